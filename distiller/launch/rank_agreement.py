"""What must be the same on every rank, or they do not do the work of one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from distiller.config.recipe import PATHS, Recipe
from distiller.config.sections import flatten

PACKAGES = ("distiller", "torch", "accelerate", "deepspeed", "diffusers", "transformers")


def config_to_compare(recipe: Recipe, launch: Mapping[str, Any]) -> dict[str, Any]:
    """For JSON, by the names that messages give it; not where files lie on a machine.

    Of the data the content is compared elsewhere, of teacher and student it is not.

    Args:
        launch: what the launch file decides: the engine and its settings, the precision.
    """
    keys = flatten(json.loads(recipe.model_dump_json()))
    versions = {f"the version of {name}": _version(name) for name in PACKAGES}
    return {name: value for name, value in keys.items() if name not in PATHS} | dict(launch) | versions


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
