"""Whether the student is compiled: by Accelerate as the launch file says, or block by block as `train.compile` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import DynamoBackend

from distiller.config.recipe import Recipe
from distiller.errors import UserError
from distiller.launch.block_compilation import compile_mode
from distiller.launch.values import choice, switch

SWITCHES = ("dynamo_use_dynamic", "dynamo_use_fullgraph", "dynamo_use_regional_compilation")
NEVER_COMPILED = {
    "fsdp1": "FSDP1, whose root Accelerate copies; use fsdp_version: 2",
    "deepspeed-zero3": "ZeRO-3, which gathers parameters inside the blocks; use ZeRO-2 or FSDP2",
}
"""Beginning of the engine's name -> why the recipe compiles no student there, and what to do."""


def check_compile(recipe: Recipe, options: Mapping[str, Any], engine: str = "") -> None:
    """UserError for unknown dynamo settings, contradictions of the recipe, and engines or features that rule it out.

    `engine`: one of the keys of `NEVER_COMPILED`, or anything else.
    """
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
    if chosen != "none" and engine in NEVER_COMPILED:
        raise UserError(
            f"compilation ({chosen}) is not supported with {NEVER_COMPILED[engine]}, or do not compile "
            "(train.compile=none, and no dynamo_config in the launch file)"
        )
    if recipe.task.losses.features.weight and asked != "none":
        raise UserError(
            "task.losses.features reads the blocks' outputs by hooks, which blocks that Accelerate compiles do not "
            "call anew; set its weight to 0, or take dynamo_config out of the launch file and set train.compile"
        )


def student_compile_mode(recipe: Recipe, engine: str, device: torch.device, num_updates: int) -> str:
    """The mode in which the recipe compiles the student's blocks; `none` where `auto` finds it not worth it.

    Args:
        engine: the name in summary.json.
        num_updates: of the whole run, so that a resumed run compiles as the first one did.
    """
    is_ruled_out = engine.startswith(tuple(NEVER_COMPILED))
    return "none" if is_ruled_out else compile_mode(recipe.train.compile, device, num_updates)
