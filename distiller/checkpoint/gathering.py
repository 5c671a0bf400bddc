"""The whole student on rank 0, out of all ranks' pieces and through host memory alone: no disk takes part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from distiller.checkpoint.format import split_key
from distiller.checkpoint.snapshot import Entry, Snapshot
from distiller.ranks import Ranks


def whole_on_main(snapshot: Snapshot, shapes: Mapping[str, tuple[int, ...]], ranks: Ranks) -> dict[str, Tensor]:
    """Every tensor of `shapes`, whole, on rank 0, from what the ranks' snapshots hold of one kind; {} on the others.

    Every rank calls it. Communicates from host to host. Rank 0 needs memory for the whole tensors and for one buffer
    of a snapshot; the others for nothing.
    """
    everyone = ranks.gather(snapshot.entries)
    if not ranks.is_main:
        for part in snapshot.parts():
            dist.send(part, 0, ranks.everyone)
        return {}
    whole: dict[str, Tensor] = {}
    for rank, entries in enumerate(everyone):
        parts = snapshot.parts() if rank == 0 else _received(entries, snapshot.buffer_bytes, rank, ranks)
        _place(entries, parts, shapes, whole)
    return {name: whole[name].view(shape) for name, shape in shapes.items()}


def _received(entries: list[Entry], buffer_bytes: int, rank: int, ranks: Ranks) -> Iterator[Tensor]:
    left = sum(entry.count * entry.dtype.itemsize for entry in entries)
    while left:
        part = torch.empty(min(left, buffer_bytes), dtype=torch.uint8)
        dist.recv(part, rank, ranks.everyone)
        yield part
        left -= len(part)


def _place(
    entries: list[Entry], parts: Iterator[Tensor], shapes: Mapping[str, tuple[int, ...]], whole: dict[str, Tensor]
) -> None:
    """Copies a rank's bytes to their places. An entry may lie across two parts."""
    part, taken = torch.empty(0, dtype=torch.uint8), 0
    for entry in entries:
        _, name, start = split_key(entry.key)
        target = whole.setdefault(name, torch.empty(math.prod(shapes[name]), dtype=entry.dtype))
        room = target[start : start + entry.count].view(torch.uint8)
        while len(room):
            if taken == len(part):
                part, taken = next(parts), 0
            count = min(len(room), len(part) - taken)
            room[:count] = part[taken : taken + count]
            room, taken = room[count:], taken + count
