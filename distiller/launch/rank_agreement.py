"""The settings that must be the same on every rank of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from distiller.config.recipe import PATHS, Recipe
from distiller.config.sections import flatten

PACKAGES = ("distiller", "torch", "accelerate", "deepspeed", "diffusers", "transformers")


def config_to_compare(recipe: Recipe, launch: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of this rank, for JSON, by the names that messages use; without paths of this machine.

    The content of data files is compared elsewhere; that of teacher and student is not compared.

    Args:
        launch: what follows from the launch file: the engine, its settings and the precision.
    """
    keys = flatten(json.loads(recipe.model_dump_json()))
    versions = {f"the version of {name}": _version(name) for name in PACKAGES}
    return {name: value for name, value in keys.items() if name not in PATHS} | dict(launch) | versions


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
