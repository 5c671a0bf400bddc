"""The memory that a run takes on the GPU of one rank: the one account from which plans and `auto` decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from distiller.launch.student_layout import StudentLayout
from distiller.planner.traced_update import TracedUpdate
from distiller.training.student_memory import StudentState

WORKSPACE = 64 * 2**20
"""Bytes that cuBLAS takes of torch's allocator for its products: 32 MiB on recent GPUs, and as much for a second stream
or library."""


@final
@dataclass(frozen=True)
class Account:
    """Bytes on the GPU of one rank, without the teacher's weights.

    Attributes:
        state: the student's weights, gradients, optimizer state and its engine's buffers.
        head: of the teacher's layers that every rank holds.
        update: the most that an update takes beside `head`, the teacher's weights, and the part of `state` that is
            always there.
        student_excess: how much more of `update` the student's passes take than the teacher's answer. Weights that are
            on the GPU only while the teacher answers take no more memory up to that.
    """

    state: StudentState
    head: int
    update: int
    student_excess: int

    @property
    def beside_teacher(self) -> int:
        """The peak of everything but the teacher's weights."""
        return self.state.gpu - self.state.gradients + self.head + self.update + WORKSPACE

    def peak(self, teacher_bytes: int, *, leaves_gpu: bool = False) -> int:
        """The predicted peak of allocated memory with so many bytes of the teacher's weights on this GPU.

        Args:
            leaves_gpu: whether they are there only while the teacher answers.
        """
        return self.beside_teacher + max(teacher_bytes - (self.student_excess if leaves_gpu else 0), 0)


def make_account(
    state: StudentState, layout: StudentLayout, traced: TracedUpdate, head: int, prefetch_steps: int
) -> Account:
    """The account of one rank.

    Gradients come while the backward pass frees activations. Where they are whole (one process, DDP), the trace has
    both; where an engine shards them, they are less than what was freed. From the second micro-batch of an update on,
    they are there from the start. The teacher answers all micro-batches first, and ahead of the student where it is
    asked ahead.
    """
    answers = traced.answer * layout.accumulation_steps * (1 + prefetch_steps)
    if layout.accumulation_steps > 1:
        student = traced.student_activations + state.gradients
    elif layout.engine in ("single", "ddp"):
        student = traced.student_peak
    else:
        student = max(traced.student_activations, state.gradients)
    # Both traces hold one answer.
    student, teacher = student - traced.answer, traced.teacher_peak - traced.answer
    together = student + teacher if prefetch_steps else max(student, teacher)
    alone = 0 if prefetch_steps else max(student - max(teacher, 0), 0)
    return Account(state, head, answers + max(together, 0), alone)
