"""FSDP2: each parameter is a DTensor, of which every rank holds consecutive rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distiller.student_state.base import Counters, Kind, Piece, Read, StudentState
from distiller.student_state.sharded import MomentsOf, load_moments, read_counters


class Fsdp2State(StudentState):
    """A rank's share is what FSDP gave it: none of a parameter with fewer rows than ranks, or of a second replica."""

    def __init__(self, accelerator: Accelerator, student: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._accelerator, self._optimizer = accelerator, optimizer
        module = accelerator.unwrap_model(student, keep_torch_compile=False)
        self._tensors = dict(saved_tensors(module))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See StudentState."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def pieces(self, kind: Kind) -> Iterator[Piece]:
        """See StudentState; views of the live shards. Does not communicate."""
        moments = MomentsOf(self._optimizer, kind)
        for name, tensor in self._tensors.items():
            source = tensor.detach() if kind == "weights" else moments.of(tensor)
            if source is None:
                continue
            if not isinstance(source, DTensor):
                # A buffer is whole on every rank.
                if self._accelerator.is_main_process:
                    yield Piece(name, 0, source.reshape(-1), is_lasting=True)
            elif _is_first_replica(source) and (values := source.to_local().reshape(-1)).numel():
                yield Piece(name, _start(source), values, is_lasting=True)

    def counters(self) -> Counters:
        """See StudentState."""
        return read_counters(self._optimizer, self._accelerator.scaler)

    def load(self, read: Read, counters: Counters) -> None:
        """See StudentState. Does not communicate."""

        def fill(kind: Kind, name: str, target: Tensor) -> None:
            local, start = (target.to_local(), _start(target)) if isinstance(target, DTensor) else (target, 0)
            if local.numel():
                local.copy_(read(kind, name, start, local.numel()).view(local.shape))

        with torch.no_grad():
            for name, tensor in self._tensors.items():
                fill("weights", name, tensor.detach())
            names = {id(tensor): name for name, tensor in self._tensors.items()}
            load_moments(self._optimizer, names, fill, counters.updates)
        if self._accelerator.scaler is not None and counters.loss_scale:
            self._accelerator.scaler.load_state_dict(counters.loss_scale)


def saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and persistent buffer of a module by its first name, in the module's order."""
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _axis(tensor: DTensor) -> int:
    """The mesh's axis along which it is cut; over another one, if there is one, it is replicated."""
    [axis] = [number for number, placement in enumerate(tensor.placements) if placement.is_shard(0)]
    return axis


def _start(tensor: DTensor) -> int:
    """The first element that this rank has: every rank but the last ones has as many rows as the first."""
    axis = _axis(tensor)
    rows = -(-len(tensor) // tensor.device_mesh.size(axis))
    first = min(rows * tensor.device_mesh.get_local_rank(axis), len(tensor))
    return first * math.prod(tensor.shape[1:])


def _is_first_replica(tensor: DTensor) -> bool:
    mesh, axis = tensor.device_mesh, _axis(tensor)
    return all(mesh.get_local_rank(other) == 0 for other in range(mesh.ndim) if other != axis)
