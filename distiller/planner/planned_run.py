"""A run that is planned: the recipe, and what follows from it on a machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, final

import torch

from distiller.config.placements import PLACEMENTS
from distiller.config.placements.base import PlacementSpec, Sizes, TeacherTime, TeacherWork, World
from distiller.config.recipe import Recipe
from distiller.config.teacher import Teacher
from distiller.launch.block_compilation import MIN_UPDATES
from distiller.launch.compile import NEVER_COMPILED
from distiller.launch.student_layout import StudentLayout
from distiller.planner.account import Account, make_account
from distiller.planner.kernel_times import FORWARD_SHARE, STUDENT_SHARE, kernels_ms, optimizer_ms
from distiller.planner.machines import Machine
from distiller.planner.traced_update import TracedUpdate, trace_update
from distiller.tasks.base import Task
from distiller.tasks.interfaces import ReplicatesHead
from distiller.teachers.footprint import planned_sizes
from distiller.training.student_memory import StudentState, student_state


@lru_cache(maxsize=16)
def _traced(
    task: Task[Any, Any],
    batch_size: int,
    teacher_dtype: torch.dtype,
    student_dtype: torch.dtype,
    autocast_dtype: torch.dtype | None,
    recomputes: bool,
    compiles: bool,
) -> TracedUpdate:
    return trace_update(
        task, batch_size, teacher_dtype, student_dtype, autocast_dtype, recomputes=recomputes, compiles=compiles
    )


QUANTIZED_SPEED = {"none": 1.0, "fp8": 1.6, "int8": 1.0, "nf4": 0.8}
"""How many times as fast a teacher's products are; of fp8 1.4 to 1.6 was measured (docs/performance.md)."""


@final
@dataclass(frozen=True)
class PlannedRun:
    """What a plan starts from.

    Attributes:
        teacher_dtype: of the teacher's weights.
        steps: updates of the whole run.
    """

    recipe: Recipe
    task: Task[Any, Any]
    machine: Machine
    layout: StudentLayout
    teacher_dtype: torch.dtype
    steps: int

    @cached_property
    def sizes(self) -> Sizes:
        """Of the teacher as it is held."""
        return planned_sizes(self.task.network, self.teacher_dtype, self.recipe.teacher.quantization)

    @cached_property
    def state(self) -> StudentState:
        """Of the student, on one rank."""
        return student_state(self.task.student_skeleton().num_trained_parameters(), self.recipe, self.layout)

    @cached_property
    def traced(self) -> TracedUpdate:
        """One micro-batch, followed without weights; takes seconds."""
        recomputes = self.layout.fsdp is not None and self.layout.fsdp.recomputes
        return _traced(
            self.task,
            self.recipe.train.batch_size,
            self.teacher_dtype,
            self.layout.weights_dtype,
            self.layout.autocast_dtype,
            self.recipe.train.gradient_checkpointing or recomputes,
            self.compiles_student,
        )

    @cached_property
    def account(self) -> Account:
        """The memory of one rank's GPU."""
        head = self.task.replicated_head_bytes(self.teacher_dtype) if isinstance(self.task, ReplicatesHead) else 0
        return make_account(self.state, self.layout, self.traced, head, self.recipe.teacher.prefetch_steps)

    @property
    def world(self) -> World:
        """The ranks and GPUs among which a placement divides the teacher."""
        local = max(self.layout.num_processes // self.machine.num_machines, 1)
        return World(self.layout.num_processes, local, self.machine.num_gpus)

    @property
    def compiles_student(self) -> bool:
        """Whether the student's blocks are compiled."""
        can_compile = self.machine.gpu is not None and not self.layout.engine.startswith(tuple(NEVER_COMPILED))
        return can_compile and self._is_compiled(self.recipe.train.compile)

    def options(self, name: str) -> Teacher:
        """The recipe's `teacher` section with this placement."""
        return self.recipe.teacher.model_copy(update={"placement": name})

    def teacher_work(self, name: str) -> TeacherWork:
        """What an update asks of the teacher under a placement; on a machine with GPUs."""
        assert self.machine.gpu is not None
        spec, teacher = PLACEMENTS[name], self.recipe.teacher
        why_not = spec.why_not_compiled
        if self.layout.zero_stage is not None:
            why_not = why_not or spec.why_not_compiled_beside_deepspeed
        pass_ms = kernels_ms(
            self.traced.teacher_kernels,
            self.machine.gpu,
            is_compiled=not why_not and self._is_compiled(teacher.compile),
            share=FORWARD_SHARE,
            product_speed=QUANTIZED_SPEED[teacher.quantization],
        )
        return TeacherWork(self.layout.accumulation_steps, pass_ms)

    @property
    def student_ms(self) -> float:
        """Of an update's passes through the student, forward and backward; on a machine with GPUs."""
        assert self.machine.gpu is not None
        compiles = self.compiles_student
        once = kernels_ms(self.traced.student_kernels, self.machine.gpu, is_compiled=compiles, share=STUDENT_SHARE)
        return once * self.layout.accumulation_steps

    def step_time(self, spec: PlacementSpec[Any]) -> TeacherTime:
        """The time of an update under a placement, and what most of it goes to; on a machine with GPUs."""
        assert self.machine.gpu is not None and spec.time is not None
        teacher = TeacherTime(0.0)
        if self.task.needs_live_teacher:
            options = spec.options.of(self.options(spec.name))
            teacher = spec.time(self.teacher_work(spec.name), self.sizes, options, self.world, self.machine.links)
        student_ms = self.student_ms
        optimizer = optimizer_ms(self.state, self.layout, self.machine.gpu)
        # Asked ahead, the teacher's time hides behind the student's where it waits for a link or computes elsewhere. On
        # one GPU both share its units.
        hides = self.recipe.teacher.prefetch_steps > 0 and (spec.computes_elsewhere or not teacher.is_computing)
        both_ms = max(teacher.ms, student_ms) if hides else teacher.ms + student_ms
        bound_by = f"teacher: {teacher.bound_by}" if teacher.ms > student_ms + optimizer else "student"
        return TeacherTime(both_ms + optimizer, bound_by)

    def _is_compiled(self, asked: str) -> bool:
        return asked != "none" and (asked != "auto" or self.steps >= MIN_UPDATES)
