"""Creates the StudentState of an engine, by the engine's name as in summary.json."""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import nn

from distiller.student_state.base import StudentState
from distiller.student_state.fsdp1 import Fsdp1State
from distiller.student_state.fsdp2 import Fsdp2State
from distiller.student_state.plain import PlainState
from distiller.student_state.zero3 import Zero3State
from distiller.student_state.zero12 import Zero12State

STATES: dict[str, Callable[[Accelerator, nn.Module, torch.optim.Optimizer], StudentState]] = {
    "single": PlainState,
    "ddp": PlainState,
    "fsdp1": Fsdp1State,
    "fsdp2": Fsdp2State,
    "deepspeed-zero1": Zero12State,
    "deepspeed-zero2": Zero12State,
    "deepspeed-zero3": Zero3State,
}


def open_state(
    engine: str, accelerator: Accelerator, student: nn.Module, optimizer: torch.optim.Optimizer
) -> StudentState:
    """The state of a prepared student and its optimizer. A suffix `-offload` of the engine's name is ignored."""
    return STATES[engine.removesuffix("-offload")](accelerator, student, optimizer)
