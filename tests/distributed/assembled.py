"""The student's state, put together from every rank's pieces."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distiller.student_state.base import KINDS, Kind, StudentState


def assembled(state: StudentState) -> dict[tuple[Kind, str], Tensor]:
    """All ranks' pieces, assembled, with a check that they hold every element once. Communicates."""
    mine = [
        (kind, piece.name, piece.start, piece.values.clone().cpu()) for kind in KINDS for piece in state.pieces(kind)
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found: dict[tuple[Kind, str], list[tuple[int, Tensor]]] = {}
    for kind, name, start, values in (piece for pieces in everyone for piece in pieces):
        found.setdefault((kind, name), []).append((start, values))
    return {key: _joined(runs, state.shapes[key[1]]) for key, runs in found.items()}


def _joined(runs: list[tuple[int, Tensor]], shape: tuple[int, ...]) -> Tensor:
    runs.sort(key=lambda run: run[0])
    end = 0
    for start, values in runs:
        assert start == end, f"{start} follows {end}"
        end += len(values)
    assert end == torch.Size(shape).numel()
    return torch.cat([values for _, values in runs])
