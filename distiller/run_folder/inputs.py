"""The input files that a recipe names: in a resumed run their paths may have changed, their content may not."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distiller.config.loading import parse
from distiller.config.recipe import PATHS, Recipe
from distiller.config.sections import flatten
from distiller.errors import UserError
from distiller.run_folder.input_files import Digests, digest_input, is_on_hub
from distiller.storage.durable_writes import write_durably
from distiller.storage.hub import looks_like_hub_id
from distiller.storage.packaged_files import ASSET_PREFIX, PACKAGE_PREFIX

INPUTS_FILE = "inputs.json"
INPUTS = {
    "teacher.path": ("teacher.path", "teacher.revision", "teacher.subfolder"),
    "student.path": ("student.path",),
    "student.config": ("student.config",),
    "data.path": ("data.path",),
}
"""Inputs whose content is compared on resume -> the keys that locate them."""


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe with absolute paths. Hub ids, packaged files and URLs are left as they are."""
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


def record_inputs(recipe: Recipe, run_dir: Path) -> None:
    """Writes the digests of the run's inputs, in its first session, when all of them are on this machine.

    In a resumed run, compares files that were fetched from a hub after `check_same_inputs`. Does not communicate.

    Raises:
        UserError: a fetched file is not the one that the run began with.
    """
    file = run_dir / INPUTS_FILE
    if not file.exists():
        write_durably(file, json.dumps({key: digest_input(recipe, key) for key in INPUTS}, indent=1) + "\n")
        return
    for key, before in recorded_inputs(run_dir).items():
        if before is not None and key in INPUTS and is_on_hub(recipe, key):
            where = f"{key} {getattr(recipe, key.split('.')[0]).path} is no longer what the run began with"
            _compare(before, recipe, key, where)


def recorded_inputs(run_dir: Path) -> Mapping[str, Digests | None]:
    """What `record_inputs` wrote; {} for a run of an older version, or one that ended before it."""
    try:
        return json.loads((run_dir / INPUTS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"--resume: {run_dir / INPUTS_FILE} is damaged ({error}); remove it") from error


def check_same_inputs(run_dir: Path, original: Mapping[str, Any], recipe: Recipe) -> None:
    """Compares a run's inputs with those that it began with. Reads files; does not communicate.

    A teacher is compared in any case, the other inputs where their paths have changed: data at the same path are
    compared by their digest in the checkpoint.

    Args:
        original: the recipe that the run began with, by dotted keys.
        recipe: the recipe of this session.

    Raises:
        UserError: the content of an input has changed; or its path has, and its first content is not known.
    """
    now, was = flatten(json.loads(with_absolute_paths(recipe).model_dump_json())), absolute_paths(original)
    recorded = recorded_inputs(run_dir)
    for key, places in INPUTS.items():
        others = [place for place in places if now.get(place) != was.get(place)]
        if not others and (key != "teacher.path" or recorded.get(key) is None):
            continue
        before = recorded.get(key) or _digest_unrecorded(original, key)
        moved = "; ".join(f"{place} was {was.get(place)} and is {now.get(place)} now" for place in others)
        if before is None:
            raise UserError(f"--resume: {moved}, and what the first held is not known; give the first again")
        _compare(before, recipe, key, moved or f"{key} {now.get(key)} is no longer what the run began with")


def _compare(before: Digests, recipe: Recipe, key: str, where: str) -> None:
    """UserError, which begins with `where`, if the digests of an input are not `before`. Further files are ignored.

    Of a hub's model, files that are not in the local cache are left out: weights are fetched later, and `record_inputs`
    compares them then; components that only a complete stage needed are not fetched again.
    """
    after = digest_input(recipe, key) or {}
    names = [name for name in before if name in after] if is_on_hub(recipe, key) else list(before)
    wrong = next((name for name in names if after.get(name) != before[name]), None)
    if wrong is not None:
        what = f"{wrong or 'the file'} {'differs' if wrong in after else 'is not there'}"
        raise UserError(f"--resume: {where}: {what}; give the same files, or begin another run")


def absolute_paths(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys with absolute paths, for a recipe that an older version wrote as it was given."""
    return {
        key: _absolute(key, value) if key in PATHS and isinstance(value, str) else value for key, value in keys.items()
    }


def _digest_unrecorded(original: Mapping[str, Any], key: str) -> Digests | None:
    """Digests of what lies at the path of the original recipe, for runs without a record of it."""
    tree: dict[str, Any] = {}
    for name, value in original.items():
        *sections, last = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    try:
        return digest_input(parse(tree), key)
    except UserError:
        return None


def _absolute(key: str, value: str) -> str:
    if value.startswith((ASSET_PREFIX, PACKAGE_PREFIX)) or "://" in value:
        return value
    place = os.path.abspath(os.path.expanduser(value))
    is_hub_id = key in ("teacher.path", "student.path") and looks_like_hub_id(value) and not os.path.exists(place)
    return value if is_hub_id else place
