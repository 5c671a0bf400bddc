"""The key of a cache (everything that its content depends on), and how two keys differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from distiller.config.quantization import ARITHMETIC
from distiller.config.recipe import Recipe
from distiller.errors import shown
from distiller.storage.stages import digest_files
from distiller.tasks.interfaces import Cacheable

FORMAT = 1


def content_key(recipe: Recipe, task: Cacheable[Any, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Everything that a stored output depends on, in JSON's types. Reads the teacher's files for their digest.

    Left out is what only decides when an output is computed (order, world size, batch size), and the placement and the
    libraries' versions, which the manifest records.
    """
    network = task.network
    files = [file for name in network.module_names for file in network.weight_files(name)]
    key: dict[str, Any] = {
        "format": FORMAT,
        "task": {"kind": recipe.task.kind},
        "teacher": {
            "weights": digest_files(files),
            "dtype": str(dtype).removeprefix("torch."),
            "quantization": ARITHMETIC[recipe.teacher.quantization],
        },
        "train": {"tf32": recipe.train.tf32},
        # The digest last, so that `first_difference` names a setting rather than the digest that depends on it.
        "data": {**task.data_settings(), "samples": task.num_samples, "digest": task.data_digest},
        "form": task.cached_form(),
    }
    if task.has_draws:
        key["seed"] = recipe.seed
    # Last, since these values often follow from a key above, which `first_difference` should name instead.
    key["inputs"] = task.cached_inputs(dtype)
    # As it will be read back from a file: JSON turns tuples into lists.
    return json.loads(json.dumps(key))


def first_difference(held: Mapping[str, Any], asked: Mapping[str, Any], prefix: str = "") -> str | None:
    """In words, the first field in which two keys differ, and both values; None if the keys are equal.

    Args:
        held: the key of the cache.
        asked: the key of the recipe; fields are compared in its order.
    """
    for name in [*asked, *(name for name in held if name not in asked)]:
        field, asked_value, held_value = f"{prefix}{name}", asked.get(name), held.get(name)
        if isinstance(asked_value, Mapping) and isinstance(held_value, Mapping):
            if (found := first_difference(held_value, asked_value, f"{field}.")) is not None:
                return found
        elif asked_value != held_value:
            return f"{field} is {shown(held_value)} there and {shown(asked_value)} here"
    return None
