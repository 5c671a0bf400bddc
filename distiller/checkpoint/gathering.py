"""Gathers the whole student on rank 0 from all ranks' pieces, through host memory and without files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from distiller.checkpoint.format import split_key
from distiller.checkpoint.snapshot import Snapshot, SnapshotEntry
from distiller.distributed.ranks import Ranks


def whole_on_main(snapshot: Snapshot, shapes: Mapping[str, tuple[int, ...]], ranks: Ranks) -> dict[str, Tensor]:
    """Every tensor of `shapes`, whole (CPU), on rank 0, from the ranks' snapshots of one kind; {} on the others.

    Every rank calls it. Communicates from host to host. Rank 0 needs memory for the whole tensors and one buffer of a
    snapshot; the others need none.

    Raises:
        AgreedError: on every rank, where rank 0 lacks the memory; before anything is sent.
    """
    entries_of_ranks = ranks.gather(snapshot.entries)

    def allocate() -> tuple[dict[str, Tensor], Tensor]:
        received = max((_num_bytes(entries) for entries in entries_of_ranks[1:]), default=0)
        return _allocate(entries_of_ranks, shapes), torch.empty(min(received, snapshot.buffer_bytes), dtype=torch.uint8)

    # Before sending: the other ranks would wait for ever for a rank 0 that fails later.
    allocated = ranks.all_succeed(lambda: allocate() if ranks.is_main else None)
    if allocated is None:
        for part in snapshot.parts():
            dist.send(part, 0, ranks.world_group)
        return {}
    whole, buffer = allocated
    for rank, entries in enumerate(entries_of_ranks):
        parts = snapshot.parts() if rank == 0 else _receive(entries, buffer, rank, ranks)
        _copy_entries(entries, parts, whole)
    return {name: whole[name].view(shape) for name, shape in shapes.items()}


def _num_bytes(entries: list[SnapshotEntry]) -> int:
    return sum(entry.count * entry.dtype.itemsize for entry in entries)


def _allocate(entries_of_ranks: list[list[SnapshotEntry]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Memory for each whole tensor, 1-D."""
    whole: dict[str, Tensor] = {}
    for entries in entries_of_ranks:
        for entry in entries:
            _, name, _ = split_key(entry.key)
            if name not in whole:
                whole[name] = torch.empty(math.prod(shapes[name]), dtype=entry.dtype)
    return whole


def _receive(entries: list[SnapshotEntry], buffer: Tensor, rank: int, ranks: Ranks) -> Iterator[Tensor]:
    """A rank's bytes, part by part; each part is in `buffer`, and valid until the next one is requested."""
    remaining = _num_bytes(entries)
    while remaining:
        part = buffer[:remaining]
        dist.recv(part, rank, ranks.world_group)
        yield part
        remaining -= len(part)


def _copy_entries(entries: list[SnapshotEntry], parts: Iterator[Tensor], whole: Mapping[str, Tensor]) -> None:
    """Copies a rank's bytes into the whole tensors. An entry may begin in one part and end in a later one."""
    part, taken = torch.empty(0, dtype=torch.uint8), 0
    for entry in entries:
        _, name, start = split_key(entry.key)
        target = whole[name][start : start + entry.count].view(torch.uint8)
        while len(target):
            if taken == len(part):
                part, taken = next(parts), 0
            count = min(len(target), len(part) - taken)
            target[:count] = part[taken : taken + count]
            target, taken = target[count:], taken + count
