"""FSDP2: each parameter is a DTensor, of which every rank holds consecutive rows."""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import final

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distiller.student_state.base import Counters, Kind, Piece, Read, StudentState
from distiller.student_state.saved_tensors import SavedTensors
from distiller.student_state.torch_adamw import Moments, load_moments, load_scaler, read_counters


@final
class Fsdp2State(StudentState):
    """A rank's pieces are its shards, except empty shards (fewer rows than ranks) and those of a second replica."""

    def __init__(self, accelerator: Accelerator, student: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._accelerator, self._optimizer = accelerator, optimizer
        self._saved = SavedTensors(accelerator.unwrap_model(student, keep_torch_compile=False))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See StudentState."""
        return {name: tuple(tensor.shape) for name, tensor in self._saved.tensors.items()}

    def pieces(self, kind: Kind) -> Iterator[Piece]:
        """See StudentState; views of the live shards. Does not communicate."""
        moments = Moments(self._optimizer, kind)
        for name, parameter in self._saved.parameters.items():
            source = parameter.detach() if kind == "weights" else moments.get(parameter)
            if isinstance(source, DTensor) and _is_first_replica(source) and source.to_local().numel():
                yield Piece(name, _start(source), source.to_local().reshape(-1), is_persistent=True)
        if kind == "weights" and self._accelerator.is_main_process:
            yield from self._saved.buffer_pieces()

    def counters(self) -> Counters:
        """See StudentState."""
        return read_counters(self._optimizer, self._accelerator.scaler)

    def load(self, read: Read, counters: Counters) -> None:
        """See StudentState. Does not communicate."""

        def load_tensor(kind: Kind, name: str, target: Tensor) -> None:
            assert isinstance(target, DTensor)
            if (local := target.to_local()).numel():
                local.copy_(read(kind, name, _start(target), local.numel()).view(local.shape))

        with torch.no_grad():
            for name, parameter in self._saved.parameters.items():
                load_tensor("weights", name, parameter.detach())
            names = {id(parameter): name for name, parameter in self._saved.parameters.items()}
            load_moments(self._optimizer, names, load_tensor, counters.updates)
        self._saved.load_buffers(read)
        load_scaler(self._accelerator.scaler, counters)


def _axis(tensor: DTensor) -> int:
    """Index of the mesh axis over which the rows are sharded; over any other axis the tensor is replicated."""
    [axis] = [i for i, placement in enumerate(tensor.placements) if placement.is_shard(0)]
    return axis


def _start(tensor: DTensor) -> int:
    """Index of this rank's first element: all ranks but the last ones have as many rows as the first rank."""
    axis = _axis(tensor)
    rows = -(-len(tensor) // tensor.device_mesh.size(axis))
    first = min(rows * tensor.device_mesh.get_local_rank(axis), len(tensor))
    return first * math.prod(tensor.shape[1:])


def _is_first_replica(tensor: DTensor) -> bool:
    mesh, axis = tensor.device_mesh, _axis(tensor)
    return all(mesh.get_local_rank(other) == 0 for other in range(mesh.ndim) if other != axis)
