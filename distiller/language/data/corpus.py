"""Sources of documents: text files, JSON lines, data sets, or the help texts of Python."""

from __future__ import annotations

import glob
import importlib
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, final

from distiller.config.causal_lm import LanguageData
from distiller.data.folders import files_below, files_matching, has_linked_folder
from distiller.errors import UserError
from distiller.language.data.documents import FORMS, Document, Text, document_of, is_blank, without_nulls
from distiller.storage.packaged_files import local_path, search_note
from distiller.storage.stages import digest_files, digest_of

FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text"}
"""Suffix of a single file -> the name of its format in `datasets`."""


KIND_OF_SUFFIX = {".txt": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "datasets", ".arrow": "datasets"}
"""Suffixes of files of documents -> the `data.kind` that reads them."""


class Corpus(ABC):
    """A source of documents in a fixed order.

    Construction looks for the files and raises UserError where it finds none; documents are read by iteration.
    """

    @property
    @abstractmethod
    def digest(self) -> str:
        """The digest of everything that documents are read from. Reads it all; raises OSError or UserError."""

    @abstractmethod
    def __iter__(self) -> Iterator[Document]:
        """The documents, blank ones included. Raises UserError, naming file and line, for what cannot be read."""


@final
class TextFiles(Corpus):
    """One document per file of plain text."""

    def __init__(self, path: str) -> None:
        self._files = _find_files(path, (".txt",))
        for file in self._files:
            if (kind := KIND_OF_SUFFIX.get(file.suffix.lower(), "text")) != "text":
                raise UserError(
                    f"data.path: {file} is no plain text, and data.kind=text would learn it as it stands; set "
                    f"data.kind={kind}"
                )

    @property
    def digest(self) -> str:
        return digest_files(self._files)

    def __iter__(self) -> Iterator[Document]:
        for file in self._files:
            text = _decoded(_read(file), str(file), first_line=1)
            yield Text(str(file), text.replace("\r\n", "\n").replace("\r", "\n"))


@final
class JsonLines(Corpus):
    """One document per line of JSON; blank lines are skipped."""

    def __init__(self, path: str) -> None:
        self._files = _find_files(path, (".jsonl", ".ndjson"))

    @property
    def digest(self) -> str:
        return digest_files(self._files)

    def __iter__(self) -> Iterator[Document]:
        for file in self._files:
            try:
                with file.open("rb") as stream:
                    for line_number, line in enumerate(stream, start=1):
                        origin = f"{file} line {line_number}"
                        if text := _decoded(line, str(file), first_line=line_number).strip():
                            yield document_of(_parsed(text, origin), origin)
            except OSError as error:
                raise UserError(f"data.path: {file} cannot be read ({error.strerror})") from error


@final
class DataSet(Corpus):
    """One document per row of a data set that `datasets` saved, or that it builds from local files."""

    def __init__(self, path: str, split: str) -> None:
        self._path, self._split = local_path(path), split
        if not os.path.exists(self._path):
            raise UserError(
                f"data.path: {path} does not exist{search_note(self._path)}; give a data set's folder or a file on "
                "this machine"
            )
        if self._path.is_file() and self._path.suffix not in FORMATS:
            raise UserError(f"data.path: {path} is none of {', '.join(FORMATS)}; give one, or a data set's folder")
        try:
            self._library: Any = importlib.import_module("datasets")
        except ImportError as error:
            why = f"pip install 'distiller[datasets]' ({error})"
            raise UserError(f"data.kind=datasets needs datasets; {why}") from error

    @property
    def digest(self) -> str:
        files = [self._path] if self._path.is_file() else _files_in(self._path)
        # Paths count as well: files of the same name in different folders hold different splits.
        return digest_of([[os.path.relpath(file, self._path), digest_files([file])] for file in sorted(files)])

    def __iter__(self) -> Iterator[Document]:
        # A fresh cache: the usual one of `datasets` does not notice that the content of a file has changed.
        with tempfile.TemporaryDirectory() as cache:
            for index, row in enumerate(self._open(cache)):
                origin = f"{self._path} row {index}"
                # A table has every column in every row, also inside of objects, with null where a row has no such key.
                yield document_of(without_nulls(row), origin)

    def _open(self, cache: str) -> Any:
        path = self._path
        try:
            if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
                dataset = self._library.load_from_disk(str(path))
            elif path.is_file():
                dataset = self._library.load_dataset(FORMATS[path.suffix], data_files=str(path), cache_dir=cache)
            else:
                folder = _with_plain_folders(path, Path(cache)) if has_linked_folder(path) else path
                dataset = self._library.load_dataset(str(folder), cache_dir=cache)
        except Exception as error:
            # The reader of each format raises exceptions of its own.
            why = " ".join(str(error).split())
            raise UserError(f"data.path: datasets cannot read {path} ({type(error).__name__}: {why})") from error
        if not isinstance(dataset, self._library.DatasetDict):
            return dataset
        if self._split not in dataset:
            raise UserError(f"data.split: {path} has no {self._split}; there are: {', '.join(dataset)}")
        return dataset[self._split]


@final
class PythonDocs(Corpus):
    """The topics of Python's `help()`: English texts that differ between versions of Python (3.11: 79, 465 KB)."""

    def __init__(self) -> None:
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise UserError(
                "data.kind=python-docs: this Python was installed without pydoc_data; take data.kind=text and a path"
            ) from error
        self._topics = dict(sorted(topics.items()))

    @property
    def digest(self) -> str:
        return digest_of(self._topics)

    def __iter__(self) -> Iterator[Document]:
        for name, text in self._topics.items():
            yield Text(f"pydoc_data.topics {name}", text)


def open_corpus(data: LanguageData) -> Corpus:
    """The source of documents that a recipe names. Raises UserError."""
    if data.kind == "python-docs":
        return PythonDocs()
    assert data.path is not None, "checked by the recipe"
    if data.kind == "datasets":
        return DataSet(data.path, data.split)
    return TextFiles(data.path) if data.kind == "text" else JsonLines(data.path)


def documents_of(corpus: Corpus, max_samples: int | None) -> Iterator[Document]:
    """The documents that are not blank, of which the first `max_samples`; None = all."""
    return islice((document for document in corpus if not is_blank(document)), max_samples)


def _find_files(path: str, suffixes: Sequence[str]) -> list[Path]:
    """The file at `path`, a folder's files with one of these suffixes at any depth, or the files of a glob.

    Sorted by path. Suffixes are compared in lower case.

    Raises UserError where there are none.
    """
    local = local_path(path)
    if local.is_dir():
        files = [file for file in files_below(local) if file.suffix.lower() in suffixes]
        if not files:
            others = sorted({kind for file in files_below(local) if (kind := KIND_OF_SUFFIX.get(file.suffix.lower()))})
            hint = f"set data.kind={others[0]}" if others else f"give a glob, such as '{path}/**/*.md'"
            raise UserError(f"data.path: the folder {path} holds no *{suffixes[0]}; {hint}")
        return files
    if local.exists():
        return [local]
    if glob.has_magic(path):
        files = files_matching(str(local))
        if not files:
            raise UserError(f"data.path: no file matches {path}")
        return files
    raise UserError(f"data.path: {path} does not exist{search_note(local)}; give a file, a folder or a glob")


def _files_in(folder: Path) -> list[Path]:
    """The files that `datasets` reads: it skips links whose target is missing."""
    return [file for file in files_below(folder) if file.is_file()]


def _with_plain_folders(folder: Path, cache: Path) -> Path:
    """Makes the same tree below `cache`, of real folders and links to files, since `datasets` skips linked folders."""
    mirror = cache / "linked" / folder.resolve().name
    for file in _files_in(folder):
        link = mirror / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.resolve())
    return mirror


def _read(file: Path) -> bytes:
    """The content of a file. Raises UserError."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"data.path: {file} cannot be read ({error.strerror})") from error


def _decoded(content: bytes, origin: str, first_line: int) -> str:
    """The text of UTF-8 bytes with or without BOM. Raises UserError with the line's number, from `first_line` on."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = first_line + content[: error.start].count(b"\n")
        raise UserError(
            f"data.path: {origin} line {line} is not UTF-8 text ({error.reason}); save it as UTF-8"
        ) from error
    if "\0" in text:
        line = first_line + text[: text.index("\0")].count("\n")
        raise UserError(f"data.path: {origin} line {line} holds a NUL character, so it is no text; save it as UTF-8")
    return text


def _parsed(text: str, origin: str) -> Any:
    """The value of a JSON text. Raises UserError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"data.path: {origin} is not JSON ({error}); write a line for each of {FORMS}") from error
