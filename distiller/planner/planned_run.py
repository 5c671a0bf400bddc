"""A run that is planned: the recipe, and what follows from it on a machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, final

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


class UpdateTime(NamedTuple):
    """Milliseconds of an update, and what most of it goes to."""

    ms: float
    bound_by: str


@final
@dataclass(frozen=True)
class PlannedRun:
    """What a plan starts from.

    Attributes:
        teacher_dtype: of the teacher's weights.
        steps: updates of the whole run.
        compiled: whether the student's and the teacher's blocks are compiled, where that has been decided; None = as
            `auto` would decide on the machine.
    """

    recipe: Recipe
    task: Task[Any, Any]
    machine: Machine
    layout: StudentLayout
    teacher_dtype: torch.dtype
    steps: int
    compiled: tuple[bool, bool] | None = None

    @cached_property
    def sizes(self) -> Sizes:
        """Of the teacher as it is held."""
        return planned_sizes(self.task.network, self.teacher_dtype, self.recipe.teacher.quantization)

    @cached_property
    def _trained_sizes(self) -> list[int]:
        return [parameter.numel() for parameter in self.task.student_skeleton().parameters()]

    @property
    def num_parameters(self) -> int:
        """Of all that is trained."""
        return sum(self._trained_sizes)

    @cached_property
    def state(self) -> StudentState:
        """Of the student, on one rank."""
        return student_state(self.num_parameters, self.recipe, self.layout)

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
        if self.compiled is not None:
            return self.compiled[0]
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
            is_compiled=not why_not and self._compiles_teacher,
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

    def step_time(self, spec: PlacementSpec[Any]) -> UpdateTime:
        """The time of an update under a placement, and what most of it goes to; on a machine with GPUs."""
        assert self.machine.gpu is not None and spec.time is not None
        teacher = TeacherTime(0.0, 0.0)
        if self.task.needs_live_teacher:
            options = spec.options.of(self.options(spec.name))
            teacher = spec.time(self.teacher_work(spec.name), self.sizes, options, self.world, self.machine.links)
        student_ms = self.student_ms
        optimizer = optimizer_ms(
            self.num_parameters, len(self._trained_sizes), self.state, self.layout, self.machine.gpu
        )
        both_ms = teacher.ms + student_ms
        if self.recipe.teacher.prefetch_steps:
            # Beside the student it waits for links and for others; what its GPU computes for both adds up.
            both_ms = max(teacher.ms, teacher.computing_ms + student_ms)
        bound_by = f"teacher: {teacher.bound_by}" if teacher.ms > student_ms + optimizer else "student"
        return UpdateTime(both_ms + optimizer, bound_by)

    def stage_pass_ms(self, spec: PlacementSpec[Any], num_samples: int) -> float:
        """A sample's share of one forward pass of so many samples before the loop; on a machine with GPUs."""
        assert spec.time is not None
        pass_ms = self.teacher_work(spec.name).pass_ms * num_samples / self.recipe.train.batch_size
        options = spec.options.of(self.options(spec.name))
        time = spec.time(TeacherWork(1, pass_ms), self.sizes, options, self.world, self.machine.links)
        return time.ms / num_samples

    @property
    def _compiles_teacher(self) -> bool:
        return self._is_compiled(self.recipe.teacher.compile) if self.compiled is None else self.compiled[1]

    def _is_compiled(self, asked: str) -> bool:
        return asked != "none" and (asked != "auto" or self.steps >= MIN_UPDATES)
