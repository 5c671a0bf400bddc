"""What the training loop gets and returns."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, final

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from distiller.checkpoint.best import Best
from distiller.checkpoint.format import SessionTotals
from distiller.checkpoint.saving import Checkpoints
from distiller.config.recipe import Recipe
from distiller.data.order import UpdatePlan
from distiller.distributed.ranks import Ranks
from distiller.errors import CheckpointError
from distiller.student_state.moving_average import MovingAverage
from distiller.tasks.base import Task
from distiller.teachers.base import Teacher
from distiller.teachers.quantization.error import QuantizationError
from distiller.training.expectation import Expectation
from distiller.training.memory_advice import PlannedMemory
from distiller.training.tracking import Tracker


@dataclass
class Run:
    """What the loop needs, built by `distiller.build`. `student` and `optimizer` are prepared; the teacher never is."""

    recipe: Recipe
    accelerator: Accelerator
    engine: str
    mixed_precision: str
    plan: UpdatePlan
    task: Task[Any, Any]
    teacher: Teacher | None
    placement: str
    student: nn.Module
    student_dtype: torch.dtype
    student_parameters: int
    optimizer: torch.optim.Optimizer
    average: MovingAverage | None
    loader: DataLoader[Any]
    checkpoints: Checkpoints
    tracker: Tracker
    first_step: int
    last_step: int
    ranks: Ranks
    skipped_steps: int
    stages_s: float
    quantization_error: QuantizationError | None = None
    started: float = field(default_factory=time.perf_counter)
    """When this session began, by `time.perf_counter`."""
    replicated_head_bytes: int = 0
    """Of the teacher, on every rank's device whatever the placement; see `ReplicatesHead`."""
    compiles_blocks: bool = False
    """Whether the teacher's or the student's blocks are compiled."""
    planned_memory: PlannedMemory = field(default_factory=PlannedMemory)
    expectation: Expectation | None = None
    """What was predicted of the GPU; None without one."""

    @property
    def sampling_teacher(self) -> Teacher | None:
        """The teacher, where it can be asked about other inputs than the data's."""
        return None if self.placement == "cached" else self.teacher


@final
@dataclass(frozen=True)
class Outcome:
    """What the loop returns.

    Attributes:
        metrics: the last logged metrics.
        spent: time, steps and failed saves of this session.
        save_error: why the last checkpoint could not be written; None where it was. The student is exported anyway.
        best: the checkpoint with the lowest loss on held-out data, with `checkpoint.keep_best`.
    """

    metrics: dict[str, Any]
    spent: SessionTotals
    save_error: CheckpointError | None = None
    best: Best | None = None
