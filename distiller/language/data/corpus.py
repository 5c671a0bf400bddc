"""Where documents come from: files, data sets, or the reference that travels with Python."""

from __future__ import annotations

import glob
import importlib
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, final

from distiller.config.causal_lm import LanguageData
from distiller.data.folders import files_below, files_matching, has_linked_folder
from distiller.errors import UserError
from distiller.language.data.documents import FORMS, Document, Text, document_of, is_blank, without_nulls
from distiller.storage.packaged_files import local_path, looked_for
from distiller.storage.stages import digest_files, digest_of

FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text"}
"""What `datasets` calls the formats of single files."""


OTHER_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "datasets", ".arrow": "datasets"}
"""Suffixes of files that hold rows of documents -> the `data.kind` that reads them."""


class Corpus(ABC):
    """A source of documents in a fixed order. Made from names alone; raises UserError."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """The digest of everything that is read. Reads it."""

    @abstractmethod
    def __iter__(self) -> Iterator[Document]:
        """The documents, blank ones included. Raises UserError for what cannot be read, naming file and line."""


@final
class TextFiles(Corpus):
    """A document a file."""

    def __init__(self, path: str) -> None:
        self._files = _find_files(path, ".txt")
        for file in self._files:
            if (kind := OTHER_KINDS.get(file.suffix.lower())) is not None:
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
    """A document a line; blank lines are none."""

    def __init__(self, path: str) -> None:
        self._files = _find_files(path, ".jsonl")

    @property
    def digest(self) -> str:
        return digest_files(self._files)

    def __iter__(self) -> Iterator[Document]:
        for file in self._files:
            try:
                with file.open("rb") as stream:
                    for number, line in enumerate(stream, start=1):
                        origin = f"{file} line {number}"
                        if text := _decoded(line, str(file), first_line=number).strip():
                            yield document_of(_parsed(text, origin), origin)
            except OSError as error:
                raise UserError(f"data.path: {file} cannot be read ({error.strerror})") from error


@final
class DataSet(Corpus):
    """A data set that `datasets` saved, or that it builds of local files."""

    def __init__(self, path: str, split: str) -> None:
        self._path, self._split = local_path(path), split
        if not os.path.exists(self._path):
            raise UserError(
                f"data.path: {path} does not exist{looked_for(self._path)}; give a data set's folder or a file on this "
                "machine"
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
        # Files of one name in several folders hold different splits.
        return digest_of([[os.path.relpath(file, self._path), digest_files([file])] for file in sorted(files)])

    def __iter__(self) -> Iterator[Document]:
        # Its cache does not know when a file's content has changed.
        with tempfile.TemporaryDirectory() as cache:
            for number, row in enumerate(self._open(cache)):
                origin = f"{self._path} row {number}"
                # A table has every column in every row, at every depth, filled with nulls where a row has none.
                yield document_of(without_nulls(row), origin)

    def _open(self, cache: str) -> Any:
        path = self._path
        try:
            if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
                found = self._library.load_from_disk(str(path))
            elif path.is_file():
                found = self._library.load_dataset(FORMATS[path.suffix], data_files=str(path), cache_dir=cache)
            else:
                folder = _with_plain_folders(path, Path(cache)) if has_linked_folder(path) else path
                found = self._library.load_dataset(str(folder), cache_dir=cache)
        except Exception as error:
            # Whatever the reader of one of a dozen formats raises.
            why = " ".join(str(error).split())
            raise UserError(f"data.path: datasets cannot read {path} ({type(error).__name__}: {why})") from error
        if not isinstance(found, self._library.DatasetDict):
            return found
        if self._split not in found:
            raise UserError(f"data.split: {path} has no {self._split}; there are: {', '.join(found)}")
        return found[self._split]


@final
class PythonDocs(Corpus):
    """The topics of Python's `help()`: 80 texts of English prose, 700 KB, other ones in every version of Python."""

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
    """The source that a recipe names. Raises UserError."""
    if data.kind == "python-docs":
        return PythonDocs()
    assert data.path is not None, "checked by the recipe"
    if data.kind == "datasets":
        return DataSet(data.path, data.split)
    return TextFiles(data.path) if data.kind == "text" else JsonLines(data.path)


def documents_of(corpus: Corpus, max_samples: int | None) -> Iterator[Document]:
    """The first so many documents that are not blank."""
    return islice((document for document in corpus if not is_blank(document)), max_samples)


def _find_files(path: str, suffix: str) -> list[Path]:
    """A file, a folder's files of a suffix at any depth, or a glob's; sorted by their paths."""
    place = local_path(path)
    if place.is_dir():
        files = [file for file in files_below(place) if file.suffix == suffix]
        if not files:
            others = sorted({kind for file in files_below(place) if (kind := OTHER_KINDS.get(file.suffix.lower()))})
            hint = f"set data.kind={others[0]}" if others else f"give a glob, such as '{path}/**/*.md'"
            raise UserError(f"data.path: the folder {path} holds no *{suffix}; {hint}")
        return files
    if place.exists():
        return [place]
    if glob.has_magic(path):
        files = files_matching(str(place))
        if not files:
            raise UserError(f"data.path: no file matches {path}")
        return files
    raise UserError(f"data.path: {path} does not exist{looked_for(place)}; give a file, a folder or a glob")


def _files_in(folder: Path) -> list[Path]:
    """The files that `datasets` sees: it passes over links to nothing."""
    return [file for file in files_below(folder) if file.is_file()]


def _with_plain_folders(folder: Path, cache: Path) -> Path:
    """The same tree of folders with links to the files: `datasets` skips folders that are links without a word."""
    mirror = cache / "linked" / folder.resolve().name
    for file in _files_in(folder):
        link = mirror / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.resolve())
    return mirror


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"data.path: {file} cannot be read ({error.strerror})") from error


def _decoded(content: bytes, origin: str, first_line: int) -> str:
    """UTF-8 with or without BOM; errors name the line, counted from that of the content's start."""
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
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"data.path: {origin} is not JSON ({error}); write a line for each of {FORMS}") from error
