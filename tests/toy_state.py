"""A student's state without an engine: plain tensors, of which each rank has a share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from distiller.checkpoint.format import Identity
from distiller.student_state.base import KINDS, Counters, Kind, Piece, Read, StudentState

SHAPES = {"wide": (7, 11), "scalar": (), "vector": (5,), "count": (1,)}
IDENTITY = Identity("ddp", 1, 8, 16, "toy", "no", "float32")


class ToyState(StudentState):
    """Element i of a tensor is `value + i`, moments are 10 and 100 more; rank r of n has run r of n equal ones."""

    def __init__(self, rank: int, world_size: int, value: float = 0.0) -> None:
        self._rank, self._world_size = rank, world_size
        self.tensors: dict[tuple[Kind, str], Tensor] = {}
        self.updates = 0
        self.fill(value)

    def fill(self, value: float) -> None:
        """Another value, in place."""
        for number, kind in enumerate(KINDS):
            for name, shape in SHAPES.items():
                numbers = torch.arange(torch.Size(shape).numel()) + value + 10**number * bool(number)
                new = numbers.to(torch.int64 if name == "count" else torch.float32)
                self.tensors.setdefault((kind, name), new).copy_(new)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return SHAPES

    def pieces(self, kind: Kind) -> Iterator[Piece]:
        for name, shape in SHAPES.items():
            if kind != "weights" and (name == "count" or not self.updates):
                continue
            size = torch.Size(shape).numel()
            start, stop = (size * rank // self._world_size for rank in (self._rank, self._rank + 1))
            if start < stop:
                yield Piece(name, start, self.tensors[kind, name][start:stop], is_persistent=True)

    def counters(self) -> Counters:
        return Counters(self.updates, {})

    def load(self, read: Read, counters: Counters) -> None:
        self.updates = counters.updates
        for kind in KINDS:
            for name, start, values in [(p.name, p.start, p.values) for p in self.pieces(kind)]:
                values.copy_(read(kind, name, start, len(values)))
