"""Whether and how the student is compiled: the launch file's dynamo settings, or the recipe's `train.compile`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.utils import DynamoBackend, TorchDynamoPlugin

from distiller.config.recipe import Recipe
from distiller.errors import UserError
from distiller.launch.values import choice, switch

SWITCHES = ("dynamo_use_dynamic", "dynamo_use_fullgraph", "dynamo_use_regional_compilation")


def check_compile(recipe: Recipe, options: Mapping[str, Any], is_fsdp1: bool = False) -> None:
    """UserError for unknown dynamo settings, contradictions of the recipe, and compilation with FSDP1 or features."""
    wanted = recipe.train.compile
    backend = str(options.get("dynamo_backend") or "no").lower()
    choice(backend, "dynamo_backend", tuple(name.lower() for name in DynamoBackend.list()))
    for name in SWITCHES:
        switch(options.get(name, False), name)
    mode = str(options.get("dynamo_mode") or "default")
    asked = "none" if backend == "no" else mode
    if asked != "none" and wanted not in ("auto", asked):
        raise UserError(
            f"train.compile is {wanted} and the launch file says {asked} (dynamo_backend {backend}); remove it from "
            "one of the two"
        )
    chosen = asked if wanted == "auto" else wanted
    if is_fsdp1 and chosen != "none":
        raise UserError(
            f"compilation ({chosen}) is not supported with FSDP1, whose root Accelerate copies; use fsdp_version: 2, "
            "or do not compile (train.compile=none, and no dynamo_config in the launch file)"
        )
    if recipe.task.losses.features.weight and chosen != "none":
        raise UserError(
            "task.losses.features reads the blocks' outputs by hooks, which compiled blocks do not call anew; set its "
            "weight to 0, or do not compile (train.compile=none, and no dynamo_config in the launch file)"
        )


def dynamo_plugin(recipe: Recipe, options: Mapping[str, Any]) -> TorchDynamoPlugin:
    """Accelerate's plugin: from the launch file where it asks for compilation, else from the recipe."""
    if recipe.train.compile in ("auto", "none") or options.get("dynamo_backend") not in (None, "no", "NO"):
        return TorchDynamoPlugin()
    return TorchDynamoPlugin(backend="inductor", mode=recipe.train.compile, use_regional_compilation=True)
