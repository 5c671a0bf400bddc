"""The files that a recipe names: where they lie may change between two starts of a run, what they hold may not."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from distiller.config import Recipe
from distiller.durable import write_durably
from distiller.errors import UserError
from distiller.hub import OTHER_FORMS, looks_like_hub_id
from distiller.recipe_file import parse
from distiller.resources import ASSET_PREFIX, PACKAGE_PREFIX, find_model_file, local_path
from distiller.sections import flatten
from distiller.weight_files import read_header

INPUTS_FILE = "inputs.json"
PATHS = (
    *("output_dir", "cache_dir", "teacher.path", "teacher.cache", "teacher.nvme_path"),
    *("student.path", "student.config", "data.path"),
)
"""Keys of a recipe that name files or folders of this machine."""
INPUTS = {
    "teacher.path": ("teacher.path", "teacher.revision", "teacher.subfolder"),
    "student.path": ("student.path",),
    "student.config": ("student.config",),
    "data.path": ("data.path",),
}
"""Inputs whose content is compared on resume, each with the keys that say where it is."""
MODEL_SUFFIXES = (".json", ".safetensors", ".gguf", ".model", ".jinja", ".txt")
"""Of the files in a model's folder that are compared."""
MOST_DATA_FILES = 256
BLOCK_BYTES, NUM_BLOCKS = 4096, 64

Digests = dict[str, str]
"""File name, relative to the input -> digest of what was looked at."""


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The same recipe for every working directory. Hub ids, packaged files and URLs are left as they are."""
    updates: dict[str, dict[str, Any]] = {}
    for key in PATHS:
        section, _, name = key.rpartition(".")
        owner = getattr(recipe, section) if section else recipe
        value = getattr(owner, name, None)
        if value is not None:
            updates.setdefault(section, {})[name] = _absolute(key, value)
    top = updates.pop("", {})
    return recipe.model_copy(
        update=top | {section: getattr(recipe, section).model_copy(update=new) for section, new in updates.items()}
    )


def look_at(recipe: Recipe, key: str) -> Digests | None:
    """What the input of a key of `INPUTS` holds, as far as a quick look shows; None where nothing is there to look at.

    Of weights that is every tensor's name, dtype, shape and a part of its middle; of other large files, evenly spaced
    blocks; of many data files, evenly spaced ones.
    """
    section, name = key.split(".")
    value = getattr(getattr(recipe, section), name, None)
    if value is None:
        return None
    if key == "data.path":
        files = list(_data_files(value))
        step = max(len(files) / MOST_DATA_FILES, 1.0)
        files = [files[int(number * step)] for number in range(min(len(files), MOST_DATA_FILES))]
    else:
        files = list(_model_files(value, recipe.teacher if section == "teacher" else None))
    return {relative: _digest(file) for relative, file in files} or None


def remember(recipe: Recipe, run_dir: Path) -> None:
    """Writes what the run's inputs hold, once, when all of them are on this machine."""
    file = run_dir / INPUTS_FILE
    if not file.exists():
        write_durably(file, json.dumps({key: look_at(recipe, key) for key in INPUTS}, indent=1) + "\n")


def remembered(run_dir: Path) -> Mapping[str, Digests | None]:
    """What `remember` wrote; {} in a run of an older version, and in one that ended before."""
    try:
        return json.loads((run_dir / INPUTS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"--resume: {run_dir / INPUTS_FILE} is damaged ({error}); remove it") from error


def check_same_inputs(run_dir: Path, held: Mapping[str, Any], recipe: Recipe) -> None:
    """Compares what a run's inputs hold with what they held when it began. Reads files; does not communicate.

    A teacher is compared wherever it lies, data and the student's beginnings where their paths are others now: data in
    their place are compared by their digest.

    Args:
        held: the recipe that the run was begun with, by dotted keys.
        recipe: that of now.

    Raises:
        UserError: one holds something else, with the file; or its path is another one and nobody knows what it held.
    """
    now, was = flatten(json.loads(with_absolute_paths(recipe).model_dump_json())), absolute_paths(held)
    known = remembered(run_dir)
    for key, places in INPUTS.items():
        others = [place for place in places if now.get(place) != was.get(place)]
        if not others and (key != "teacher.path" or known.get(key) is None):
            continue
        before = known.get(key) or _look_at_older(held, key)
        moved = "; ".join(f"{place} was {was.get(place)} and is {now.get(place)} now" for place in others)
        if before is None:
            raise UserError(f"--resume: {moved}, and what the first held is not known; give the first again")
        after = look_at(recipe, key) or {}
        # Files that lie beside them change nothing: a copy of a hub's folder holds more than was fetched of it.
        wrong = next((name for name, digest in before.items() if after.get(name) != digest), None)
        if wrong is not None:
            what = f"{wrong or 'the file'} {'differs' if wrong in after else 'is not there'}"
            where = moved or f"{key} {now.get(key)} is no longer what the run began with"
            raise UserError(f"--resume: {where}: {what}; give the same files, or begin another run")


def absolute_paths(held: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys with absolute paths, for a recipe that an older version wrote as it was given."""
    return {
        key: _absolute(key, value) if key in PATHS and isinstance(value, str) else value for key, value in held.items()
    }


def _look_at_older(held: Mapping[str, Any], key: str) -> Digests | None:
    """What lies where a run's recipe says, for runs that remember nothing of it."""
    tree: dict[str, Any] = {}
    for name, value in held.items():
        *sections, last = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    try:
        return look_at(parse(tree), key)
    except UserError:
        return None


def _absolute(key: str, value: str) -> str:
    if value.startswith((ASSET_PREFIX, PACKAGE_PREFIX)) or "://" in value:
        return value
    place = os.path.abspath(os.path.expanduser(value))
    is_hub_id = key in ("teacher.path", "student.path") and looks_like_hub_id(value) and not os.path.exists(place)
    return value if is_hub_id else place


def _model_files(path: str, teacher: Any) -> Iterator[tuple[str, Path]]:
    """The files of a model's folder; or a single one, with the name ''. Nothing where a hub's is not in the cache."""
    place = find_model_file(path)
    if not place.exists():
        try:
            revision = teacher.revision if teacher is not None else None
            place = Path(snapshot_download(path, revision=revision, local_files_only=True))
        except Exception:
            # Whatever the library raises for an id that it does not know.
            return
    if teacher is not None and teacher.subfolder and place.is_dir():
        place = place / teacher.subfolder
    if place.is_file():
        yield "", place
    for relative, file in _walk(place):
        if file.suffix in MODEL_SUFFIXES and not any(Path(relative).match(pattern) for pattern in OTHER_FORMS):
            yield relative, file


def _data_files(path: str) -> Iterator[tuple[str, Path]]:
    place = local_path(path)
    if place.is_file():
        yield "", place
    elif place.is_dir():
        yield from _walk(place)
    elif glob.has_magic(path):
        files = sorted(file for name in glob.glob(str(place), recursive=True) if (file := Path(name)).is_file())
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
            for start, length in _places(file, size):
                stream.seek(start)
                total.update(stream.read(length))
    except OSError as error:
        # Whoever needs the file says so; one that nobody reads must not end the run.
        return f"unreadable: {error.strerror}"
    return total.hexdigest()


def _places(file: Path, size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of what is read of a file."""
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
    for number in range(NUM_BLOCKS):
        yield (size - BLOCK_BYTES) * number // (NUM_BLOCKS - 1), BLOCK_BYTES
