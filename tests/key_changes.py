"""The fields of the keys of caches and stages, and rows that each change one thing that they depend on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pydantic import BaseModel

from distiller.cache.key import content_key
from distiller.config.loading import parse
from distiller.config.recipe import Recipe
from distiller.config.sections import flatten
from distiller.distributed.devices import teacher_dtype
from distiller.storage.stages import Stage
from distiller.tasks import open_task

NESTED = ("text", "latents")
"""Of the content key, the keys of stages: they are looked at on their own."""
WHOLE = ("inputs.configs", "scheduler")
"""Descriptions out of files: one field each, whatever they hold."""


@dataclass(frozen=True, eq=False)
class Change:
    """Keys of the recipe, or files under its folder, that change; and which keys show it.

    Attributes:
        shown: names of stages, and `content` for the cache's key. No others: what is still good is not made again.
        given: what both recipes say.
        files: changes files.
    """

    name: str
    shown: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    files: Callable[[Path], None] | None = None


def parsed(base: Mapping[str, Any], keys: Mapping[str, Any]) -> Recipe:
    """A recipe of dotted keys over others."""
    tree: dict[str, Any] = {}
    for key, value in {**base, **keys}.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return parse(tree)


def keys_of(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The keys of the stages that the recipe has, by name, and of a cache (`content`), each as field -> value."""
    found: dict[str, dict[str, Any]] = {}
    made = Stage.__init__

    def record(self: Stage, name: str, key: Mapping[str, Any], parent: Path) -> None:
        found[name] = fields_of(key)
        made(self, name, key, parent)

    with mock.patch.object(Stage, "__init__", record):
        task = open_task(recipe)
        content = content_key(recipe, task, teacher_dtype(recipe.teacher.dtype, torch.device("cpu")))
    for name in NESTED:
        content["inputs"].pop(name, None)
    found["content"] = fields_of(content)
    return found


def fields_of(key: Mapping[str, Any]) -> dict[str, Any]:
    """Field -> value, with dotted names."""
    fields: dict[str, Any] = {}
    for name, value in flatten(json.loads(json.dumps(key))).items():
        whole = next((prefix for prefix in WHOLE if name.startswith(f"{prefix}.")), None)
        if whole is None:
            fields[name] = value
        else:
            fields.setdefault(whole, {})[name] = value
    return fields


def differing(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]) -> set[tuple[str, str]]:
    """(key, field) of everything that is not the same in both."""
    return {
        (key, name)
        for key in before.keys() | after.keys()
        for name in before.get(key, {}).keys() | after.get(key, {}).keys()
        if before.get(key, {}).get(name) != after.get(key, {}).get(name)
    }


def leaves_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys of a recipe, or of a section of it."""
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves_of(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def change_json(file: Path, **values: Any) -> None:
    """Sets keys of a JSON object."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_weights(folder: Path) -> None:
    """Flips a bit of the last weight in the first safetensors file."""
    file = min(folder.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
