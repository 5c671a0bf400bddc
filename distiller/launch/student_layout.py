"""How a launch distributes the student: all that its memory depends on beside its own size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch

from distiller.config.recipe import Recipe
from distiller.launch.accelerator import resolve_accumulation
from distiller.launch.checks import Launch
from distiller.launch.deepspeed import Offload
from distiller.launch.fsdp import FsdpLaunch
from distiller.launch.request import OFFLOADED_PARTS, deepspeed_settings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@final
@dataclass(frozen=True)
class StudentLayout:
    """Engine, precision and processes of a run.

    Attributes:
        engine: the name in summary.json.
        num_processes: of all machines.
        accumulation_steps: micro-batches of an update.
        mixed_precision: `bf16`, `fp16` or `no`.
        offload: what DeepSpeed keeps elsewhere.
        fsdp: FSDP's settings; None without FSDP.
    """

    engine: str
    num_processes: int
    accumulation_steps: int
    mixed_precision: str
    offload: Offload
    fsdp: FsdpLaunch | None

    @property
    def zero_stage(self) -> int | None:
        """DeepSpeed's, 1 to 3; None under other engines."""
        name = self.engine.removesuffix("-offload")
        return int(name[-1]) if name.startswith("deepspeed-zero") else None

    @property
    def weights_dtype(self) -> torch.dtype:
        """The dtype in which the forward pass finds the student's weights."""
        holds_short_weights = self.zero_stage is not None or self.engine == "fsdp2"
        return DTYPES.get(self.mixed_precision, torch.float32) if holds_short_weights else torch.float32

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast in the forward pass; None where weights have the short dtype, or nothing has."""
        short = DTYPES.get(self.mixed_precision)
        return short if self.weights_dtype is torch.float32 else None


def layout_of_launch(recipe: Recipe, launch: Launch, mixed_precision: str) -> StudentLayout:
    """The layout of a run that is not started. Raises UserError where the recipe's batch does not divide."""
    engine, offload = "single" if launch.num_processes == 1 else "ddp", Offload()
    if launch.fsdp is not None:
        engine = launch.fsdp.engine
    elif launch.request is not None and launch.under_deepspeed:
        zero: dict[str, Any] = deepspeed_settings(launch.request)["zero_optimization"]
        offload = Offload(*((zero.get(part) or {}).get("device", "none") for part in OFFLOADED_PARTS))
        engine = f"deepspeed-zero{zero.get('stage', 0)}" + ("-offload" if offload.is_any else "")
    accumulation = resolve_accumulation(recipe, launch.num_processes)
    return StudentLayout(engine, launch.num_processes, accumulation, mixed_precision, offload, launch.fsdp)
