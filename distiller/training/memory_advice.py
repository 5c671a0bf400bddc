"""What to change in a recipe when a GPU's memory is used up, with what each change frees."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from distiller.training.tracking import GIB

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"


@final
@dataclass(frozen=True)
class PlannedMemory:
    """Bytes on one rank's GPU, as predicted before any weight was read.

    Attributes:
        student: its weights, gradients, moments and average; what the engine shards or offloads is not in it.
        teacher: placement -> bytes, of those that may run here and whose host memory suffices, fastest first.
    """

    student: int = 0
    teacher: Mapping[str, int] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Shortage:
    """What torch's allocator says of a request that failed, in bytes; None where its message does not say it.

    Attributes:
        gpu: its number; no bytes.
        asked: of the request.
        capacity: of the GPU.
        free: of the GPU, for any process.
        allocated: in tensors of this process.
        cached: in blocks that this process holds and that no tensor uses.
    """

    gpu: int | None
    asked: int | None
    capacity: int | None
    free: int | None
    allocated: int | None
    cached: int | None

    @classmethod
    def of(cls, message: str) -> Shortage:
        """Reads the message of a `torch.OutOfMemoryError`, which carries its numbers nowhere else."""
        gpu = re.search(r"GPU (\d+) has", message)
        return cls(
            gpu=None if gpu is None else int(gpu[1]),
            asked=_size(rf"Tried to allocate {_SIZE}", message),
            capacity=_size(rf"total capacity of {_SIZE}", message),
            free=_size(rf"of which {_SIZE} is free", message),
            allocated=_size(rf"{_SIZE} is allocated by PyTorch", message),
            cached=_size(rf"{_SIZE} is reserved by PyTorch but unallocated", message),
        )

    @property
    def missing(self) -> int:
        """Bytes that have to be freed so that this one request is met."""
        return max((self.asked or 0) - (self.free or 0), 1)

    @property
    def is_fragmented(self) -> bool:
        """Whether the request would have fitted into what the process holds unused, in one piece."""
        return self.asked is not None and self.cached is not None and self.cached >= self.asked


def _size(pattern: str, message: str) -> int | None:
    found = re.search(pattern, message)
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


@final
@dataclass(frozen=True)
class Situation:
    """What a run holds on the GPU, and what of it can be changed.

    Attributes:
        placement: of the teacher; None where there is none in the loop.
        teacher: bytes of its weights on this GPU, as its placement holds them.
        head: bytes of the teacher's layers that every rank holds, whatever the placement.
        prefetch_steps: of the recipe.
        prefetched: bytes of updates that the teacher has answered ahead.
        offloading: (the launch file that keeps the student's state elsewhere, bytes that it would free); None where
            it is there already.
        may_expand: whether the allocator may use expandable segments, and does not.
        batch_size, samples_per_update: of the run.
        accumulation_steps: None where the recipe gives no `train.gradient_accumulation_steps`.
        recomputes: whether activations are recomputed in the backward pass.
        can_quantize: whether the placement takes a quantised teacher, and the recipe's is not quantised.
    """

    placement: str | None
    teacher: int
    head: int
    prefetch_steps: int
    prefetched: int
    planned: PlannedMemory
    offloading: tuple[str, int] | None
    may_expand: bool
    batch_size: int
    samples_per_update: int
    accumulation_steps: int | None
    recomputes: bool
    can_quantize: bool

    def activations(self, shortage: Shortage) -> int:
        """Bytes that neither the teacher's weights nor the student's state take."""
        return max((shortage.allocated or 0) - self.teacher - self.head - self.planned.student, 0)


def owners(situation: Situation, shortage: Shortage) -> str:
    """Who holds what, in words; empty where torch's message does not say it."""
    if shortage.allocated is None:
        return ""
    teacher = situation.teacher + situation.head
    student = min(situation.planned.student, max(shortage.allocated - teacher, 0))
    return (
        f"teacher {_gib(teacher)}, student's weights and optimizer {_gib(student)}, activations and the rest "
        f"{_gib(situation.activations(shortage))}"
    )


def remedies(situation: Situation, shortage: Shortage) -> list[str]:
    """Settings, as they are given, of which each frees memory; what costs the least time comes first.

    Teacher placements are listed if they free at least what is missing. How much less activations take can only be
    estimated, so those settings are always listed.
    """
    found = []
    if shortage.is_fragmented and situation.may_expand:
        found.append("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (unused memory lies in pieces)")
    if situation.prefetch_steps:
        found.append(f"teacher.prefetch_steps=0 ({_gib(situation.prefetched)}, and the teacher's activations)")
    activations = situation.activations(shortage)
    if (size := _largest_divisor(situation.batch_size)) is not None:
        # The same samples an update, so that the run computes the same.
        if situation.accumulation_steps is None:
            split = f" train.samples_per_update={situation.samples_per_update}"
        else:
            steps = situation.accumulation_steps * situation.batch_size // size
            split = f" train.gradient_accumulation_steps={steps}"
        freed = activations * (1 - size / situation.batch_size)
        found.append(f"train.batch_size={size}{split} (about {_gib(freed)})")
    for name, num_bytes in situation.planned.teacher.items():
        if name != situation.placement and situation.teacher - num_bytes >= shortage.missing:
            found.append(f"teacher.placement={name} ({_gib(situation.teacher - num_bytes)})")
    if situation.can_quantize and situation.teacher / 2 >= shortage.missing:
        found.append(f"teacher.quantization=int8 (about {_gib(situation.teacher / 2)})")
    if not situation.recomputes:
        found.append("train.gradient_checkpointing=true (most of the student's activations)")
    if situation.offloading is not None and situation.offloading[1] >= shortage.missing:
        name, freed = situation.offloading
        found.append(f"the launch file {name} (about {_gib(freed)})")
    return found


def _largest_divisor(number: int) -> int | None:
    """The largest number below `number` that divides it; None for 1."""
    return next((number // factor for factor in range(2, number + 1) if number % factor == 0), None)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
