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
    if wanted == "reduce-overhead" and asked == "none":
        _check_cuda_graphs(recipe, engine)
    if recipe.task.losses.features.weight and asked != "none":
        raise UserError(
            "task.losses.features reads the blocks' outputs by hooks, which blocks that Accelerate compiles do not "
            "call anew; set its weight to 0, or take dynamo_config out of the launch file and set train.compile"
        )


def _check_cuda_graphs(recipe: Recipe, engine: str) -> None:
    """UserError where the graphs of `reduce-overhead`, each with memory of its own, would read what is gone."""
    why_not = ""
    if engine == "fsdp2":
        why_not = "FSDP2 gathers weights into other memory each time"
    elif (recipe.train.gradient_accumulation_steps or 1) > 1 or recipe.train.samples_per_update is not None:
        why_not = "an update may have several micro-batches, whose outputs would overwrite each other"
    if why_not:
        raise UserError(
            f"train.compile is reduce-overhead, which records CUDA graphs, and {why_not}; set it to default or "
            "max-autotune"
        )


def student_compile_mode(recipe: Recipe, engine: str, device: torch.device, num_updates: int) -> str:
    """The mode in which the recipe compiles the student's blocks; `none` where `auto` finds it not worth it.

    Args:
        engine: the name in summary.json.
        num_updates: of the whole run, so that a resumed run compiles as the first one did.

    Raises:
        UserError: a mode is asked for that this engine or machine cannot have.
    """
    if not engine.startswith(tuple(NEVER_COMPILED)):
        return compile_mode(recipe.train.compile, device, num_updates)
    if recipe.train.compile not in ("auto", "none"):
        raise UserError(f"train.compile is {recipe.train.compile}, which {engine} does not support; set it to none")
    return "none"
