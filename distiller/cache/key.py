"""What a cache's content depends on, and in what a recipe's differs from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from distiller.config.recipe import Recipe
from distiller.errors import shown
from distiller.storage.stages import digest_files
from distiller.tasks.interfaces import Cacheable

FORMAT = 1


def content_key(recipe: Recipe, task: Cacheable[Any, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Everything that a stored output depends on, as JSON can hold it. Reads the teacher's files for their digest.

    What only decides which outputs are asked for when (order, world size, batch size) is not in it; nor are the
    placement and the libraries' versions, which the manifest records.
    """
    network = task.network
    files = [file for name in network.module_names for file in network.weight_files(name)]
    key: dict[str, Any] = {
        "format": FORMAT,
        "task": {"kind": recipe.task.kind},
        "teacher": {
            "weights": digest_files(files),
            "dtype": str(dtype).removeprefix("torch."),
            "quantization": recipe.teacher.quantization,
        },
        "train": {"tf32": recipe.train.tf32},
        # The digest last: what it is made of is named where that can be.
        "data": {**task.data_settings(), "samples": task.num_samples, "digest": task.data_digest},
        "form": task.cached_form(),
    }
    if task.has_draws:
        key["seed"] = recipe.seed
    # Last: what it names is often the user's key in another dress.
    key["inputs"] = task.cached_inputs(dtype)
    # As it will be read back: JSON has no tuples.
    return json.loads(json.dumps(key))


def first_difference(held: Mapping[str, Any], asked: Mapping[str, Any], prefix: str = "") -> str | None:
    """The first field, in the order of what is asked, in which the two differ, and both values; None without any."""
    for name in [*asked, *(name for name in held if name not in asked)]:
        field, ours, theirs = f"{prefix}{name}", asked.get(name), held.get(name)
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            if (found := first_difference(theirs, ours, f"{field}.")) is not None:
                return found
        elif ours != theirs:
            return f"{field} is {shown(theirs)} there and {shown(ours)} here"
    return None
