"""The files of a run's inputs, and digests of samples of their content."""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from distiller.config.recipe import Recipe
from distiller.errors import UserError
from distiller.storage.hub import is_other_form
from distiller.storage.packaged_files import find_model_file, local_path
from distiller.storage.weight_files import read_header

MODEL_INDEX = "model_index.json"
MODEL_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "*.gguf", "config.json", "adapter_config.json"),
    *("scheduler_config.json", "preprocessor_config.json", "processor_config.json", "chat_template.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "*.jinja"),
)
"""Names of the files that are read of a model's folder, and compared. Results and notes beside them are not."""
NOT_READ = ("feature_extractor", "image_encoder", "safety_checker")
"""Components of pipelines that no task loads."""
NETWORKS = ("transformer", "unet")
"""Components that are read of a folder without an index."""
MAX_DATA_FILES = 256
BLOCK_BYTES, NUM_BLOCKS = 4096, 64

Digests = dict[str, str]
"""File name, relative to the input -> digest of the sampled content."""


def digest_input(recipe: Recipe, key: str) -> Digests | None:
    """Digests of samples of the input of a key of `INPUTS`; None where there are no files.

    Sampled are: of weights, every tensor's name, dtype, shape and a part of its middle; of other large files, evenly
    spaced blocks; of many data files, evenly spaced files.
    """
    section, name = key.split(".")
    value = getattr(getattr(recipe, section), name, None)
    if value is None:
        return None
    if key == "data.path":
        files = list(_data_files(value))
        step = max(len(files) / MAX_DATA_FILES, 1.0)
        files = [files[int(i * step)] for i in range(min(len(files), MAX_DATA_FILES))]
    else:
        files = list(_model_files(value, recipe.teacher if section == "teacher" else None))
    return {relative: _digest(file) for relative, file in files} or None


def is_on_hub(recipe: Recipe, key: str) -> bool:
    """Whether the input of a key of `INPUTS` is a hub's model, of which not all files may be in the local cache."""
    section, name = key.split(".")
    value = getattr(getattr(recipe, section), name, None)
    return value is not None and name == "path" and section != "data" and not find_model_file(value).exists()


def _model_files(path: str, teacher: Any) -> Iterator[tuple[str, Path]]:
    """The files that are read of a model's folder; or a single file, with the name ''.

    Nothing where a hub's model is not in the cache.
    """
    root = find_model_file(path)
    if not root.exists():
        try:
            revision = teacher.revision if teacher is not None else None
            root = Path(snapshot_download(path, revision=revision, local_files_only=True))
        except Exception:
            # Whatever the library raises for an id that it does not know.
            return
    if teacher is not None and teacher.subfolder and root.is_dir():
        root = root / teacher.subfolder
    if root.is_file():
        yield "", root
        return
    if (root / MODEL_INDEX).is_file():
        yield MODEL_INDEX, root / MODEL_INDEX
    for folder in (root, *(root / name for name in _components(root / MODEL_INDEX))):
        for file in sorted(folder.glob("*")):
            is_read = any(fnmatch.fnmatchcase(file.name, pattern) for pattern in MODEL_FILES)
            if is_read and not file.name.startswith(".") and not is_other_form(file.name) and file.is_file():
                yield os.path.relpath(file, root), file


def _components(index: Path) -> list[str]:
    """The folders that a pipeline's index names; without one, those in which a student's network may lie."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        return sorted(name for name, value in content.items() if isinstance(value, list) and name not in NOT_READ)
    except (OSError, ValueError, AttributeError):
        return list(NETWORKS)


def _data_files(path: str) -> Iterator[tuple[str, Path]]:
    root = local_path(path)
    if root.is_file():
        yield "", root
    elif root.is_dir():
        yield from _walk(root)
    elif glob.has_magic(path):
        files = sorted(file for name in glob.glob(str(root), recursive=True) if (file := Path(name)).is_file())
        top = os.path.commonpath(files) if len(files) > 1 else os.path.dirname(files[0]) if files else ""
        yield from ((os.path.relpath(file, top), file) for file in files)


def _walk(folder: Path) -> Iterator[tuple[str, Path]]:
    """(relative name, file) of everything below a folder, linked folders too, sorted; hidden files are left out."""
    seen: set[str] = set()
    found: list[tuple[str, Path]] = []
    for where, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(where)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = (Path(where) / name for name in names if not name.startswith("."))
        found += [(os.path.relpath(file, folder), file) for file in files if file.is_file()]
    yield from sorted(found)


def _digest(file: Path) -> str:
    total = hashlib.blake2b(digest_size=16)
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            total.update(f"{size};".encode())
            for start, length in _sampled_ranges(file, size):
                stream.seek(start)
                total.update(stream.read(length))
    except OSError as error:
        # A file that is needed is reported when it is read; one that is not needed must not end the run.
        return f"unreadable: {error.strerror}"
    return total.hexdigest()


def _sampled_ranges(file: Path, size: int) -> Iterator[tuple[int, int]]:
    """(start, length) in bytes of the parts of a file that are digested."""
    if size <= BLOCK_BYTES * NUM_BLOCKS:
        yield 0, size
        return
    if file.suffix == ".safetensors":
        try:
            tensors = sorted(read_header(file).values(), key=lambda tensor: tensor.start)
        except UserError:
            tensors = []
        if tensors:
            yield 0, tensors[0].start
            for tensor in tensors:
                length = min(tensor.num_bytes, BLOCK_BYTES)
                yield tensor.start + (tensor.num_bytes - length) // 2, length
            return
    for i in range(NUM_BLOCKS):
        yield (size - BLOCK_BYTES) * i // (NUM_BLOCKS - 1), BLOCK_BYTES
