"""The whole student on rank 0, out of all ranks' pieces and through host memory alone: no disk takes part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from distiller.checkpoint.format import split_key
from distiller.checkpoint.snapshot import Entry, Snapshot
from distiller.distributed.ranks import Ranks


def whole_on_main(snapshot: Snapshot, shapes: Mapping[str, tuple[int, ...]], ranks: Ranks) -> dict[str, Tensor]:
    """Every tensor of `shapes`, whole, on rank 0, from what the ranks' snapshots hold of one kind; {} on the others.

    Every rank calls it. Communicates from host to host. Rank 0 needs memory for the whole tensors and for one buffer
    of a snapshot; the others for nothing.

    Raises:
        AgreedError: on every rank, where rank 0 has not the memory. Nothing has been sent then.
    """
    everyone = ranks.gather(snapshot.entries)

    def allocate() -> tuple[dict[str, Tensor], Tensor]:
        received = max((_num_bytes(entries) for entries in everyone[1:]), default=0)
        return _allocated(everyone, shapes), torch.empty(min(received, snapshot.buffer_bytes), dtype=torch.uint8)

    # The others would wait for a rank 0 that failed after they had begun to send.
    held = ranks.all_succeed(lambda: allocate() if ranks.is_main else None)
    if held is None:
        for part in snapshot.parts():
            dist.send(part, 0, ranks.world_group)
        return {}
    whole, buffer = held
    for rank, entries in enumerate(everyone):
        parts = snapshot.parts() if rank == 0 else _received(entries, buffer, rank, ranks)
        _place(entries, parts, whole)
    return {name: whole[name].view(shape) for name, shape in shapes.items()}


def _num_bytes(entries: list[Entry]) -> int:
    return sum(entry.count * entry.dtype.itemsize for entry in entries)


def _allocated(everyone: list[list[Entry]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Memory for each whole tensor, once, as 1-D."""
    whole: dict[str, Tensor] = {}
    for entries in everyone:
        for entry in entries:
            _, name, _ = split_key(entry.key)
            if name not in whole:
                whole[name] = torch.empty(math.prod(shapes[name]), dtype=entry.dtype)
    return whole


def _received(entries: list[Entry], buffer: Tensor, rank: int, ranks: Ranks) -> Iterator[Tensor]:
    """A rank's bytes, part by part; each part is in `buffer`, and valid until the next one is asked for."""
    left = _num_bytes(entries)
    while left:
        part = buffer[:left]
        dist.recv(part, rank, ranks.world_group)
        yield part
        left -= len(part)


def _place(entries: list[Entry], parts: Iterator[Tensor], whole: Mapping[str, Tensor]) -> None:
    """Copies a rank's bytes to their places. An entry may lie across two parts."""
    part, taken = torch.empty(0, dtype=torch.uint8), 0
    for entry in entries:
        _, name, start = split_key(entry.key)
        room = whole[name][start : start + entry.count].view(torch.uint8)
        while len(room):
            if taken == len(part):
                part, taken = next(parts), 0
            count = min(len(room), len(part) - taken)
            room[:count] = part[taken : taken + count]
            room, taken = room[count:], taken + count
