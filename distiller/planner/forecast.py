"""What a run that is about to start will take of its GPUs, from which `auto` chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch

from distiller.config.placements import PLACEMENTS
from distiller.config.recipe import Recipe
from distiller.launch.student_layout import StudentLayout
from distiller.planner.account import WORKSPACE
from distiller.planner.machines import Machine
from distiller.planner.planned_run import PlannedRun
from distiller.planner.rates import gpu_here
from distiller.tasks.base import Task


@final
@dataclass(frozen=True)
class Forecast:
    """Of one rank.

    Attributes:
        update_bytes: the most that an update takes of a GPU beside the teacher's weights and the student's state with
            its gradients.
        student_excess_bytes: how much more of `update_bytes` the student's passes take than the teacher's answer.
        step_ms: placement -> time of an update; empty where the rates of this kind of GPU are not known.
    """

    update_bytes: int
    student_excess_bytes: int = 0
    step_ms: Mapping[str, float] = field(default_factory=dict)


def forecast(
    recipe: Recipe,
    task: Task[Any, Any],
    layout: StudentLayout,
    teacher_dtype: torch.dtype,
    steps: int,
    compiled: tuple[bool, bool],
    num_machines: int,
) -> Forecast:
    """Follows an update of a run on this machine's GPUs; takes seconds. Reads no weights and does not communicate.

    Raises whatever torch raises where a model cannot be followed without data.

    Args:
        compiled: whether the student's and the teacher's blocks are compiled.
    """
    gpu = gpu_here()
    # What fits is decided from the memory that is free on each rank; here it is not asked.
    machine = Machine(gpu, torch.cuda.device_count(), 0, 0, num_machines)
    run = PlannedRun(recipe, task, machine, layout, teacher_dtype, steps, compiled)
    step_ms = {}
    if gpu is not None:
        timed = (spec for spec in PLACEMENTS.values() if spec.time is not None and spec.speed is not None)
        step_ms = {spec.name: run.step_time(spec).ms for spec in timed}
    account = run.account
    return Forecast(max(account.update + WORKSPACE - run.state.gradients, 0), account.student_excess, step_ms)
