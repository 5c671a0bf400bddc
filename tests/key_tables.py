"""Helpers of the tables of a cache's key: a change of the recipe or its files, and the fields that differ then."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = dict[str, Any] | Callable[[Path], None]
"""Dotted keys of the recipe, or what changes files in a folder."""
Key = dict[str, Any]
"""Field of a key -> value."""


def changed(one: Key, other: Key) -> set[str]:
    """The fields that differ."""
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def after(change: Change, base: dict[str, Any], folder: Path, place: Path) -> tuple[Path, dict[str, Any]]:
    """The folder and the recipe's changes; files are changed in a copy, of the same times."""
    if isinstance(change, dict):
        return folder, base | change
    mine = shutil.copytree(folder, place / "files")
    change(mine)
    return mine, base


def made_once(key_of: Callable[[dict[str, Any]], Key]) -> Callable[[dict[str, Any]], Key]:
    """The same function, asked once for each set of changes."""
    made: dict[str, Key] = {}

    def of(changes: dict[str, Any]) -> Key:
        name = repr(changes)
        if name not in made:
            made[name] = key_of(changes)
        return made[name]

    return of


def named(change: Change) -> str:
    """A test's name."""
    return "-".join(change) if isinstance(change, dict) else change.__name__
