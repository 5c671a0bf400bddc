"""One process, or DDP: every rank holds all tensors, and saves and averages an equal share of them."""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false
from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from distiller.student_state.base import Counters, Kind, Piece, Read, StudentState
from distiller.student_state.saved_tensors import SavedTensors
from distiller.student_state.torch_adamw import Moments, load_moments, load_scaler, read_counters


@final
class PlainState(StudentState):
    """Pieces of rank r of n: of all parameters concatenated, the elements from r/n to (r + 1)/n; on rank 0 the buffers.

    Rank 0's buffers are enough, since DDP broadcasts them before every forward pass.
    """

    def __init__(self, accelerator: Accelerator, student: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._accelerator, self._optimizer = accelerator, optimizer
        self._saved = SavedTensors(accelerator.unwrap_model(student, keep_torch_compile=False))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See StudentState."""
        return {name: tuple(tensor.shape) for name, tensor in self._saved.tensors.items()}

    def pieces(self, kind: Kind) -> Iterator[Piece]:
        """See StudentState; views of the live tensors. Does not communicate."""
        total = sum(parameter.numel() for parameter in self._saved.parameters.values())
        rank, count = self._accelerator.process_index, self._accelerator.num_processes
        first, last = total * rank // count, total * (rank + 1) // count
        offset, moments = 0, Moments(self._optimizer, kind)
        for name, parameter in self._saved.parameters.items():
            start, stop = max(first - offset, 0), min(last - offset, parameter.numel())
            offset += parameter.numel()
            source = parameter.detach() if kind == "weights" else moments.get(parameter)
            if start < stop and source is not None:
                yield Piece(name, start, source.reshape(-1)[start:stop], is_persistent=True)
        if kind == "weights" and rank == 0:
            yield from self._saved.buffer_pieces()

    def counters(self) -> Counters:
        """See StudentState."""
        return read_counters(self._optimizer, self._accelerator.scaler)

    def load(self, read: Read, counters: Counters) -> None:
        """See StudentState. Does not communicate."""

        def load_tensor(kind: Kind, name: str, target: Tensor) -> None:
            target.copy_(read(kind, name, 0, target.numel()).view(target.shape))

        with torch.no_grad():
            for name, tensor in self._saved.tensors.items():
                load_tensor("weights", name, tensor)
        names = {id(parameter): name for name, parameter in self._saved.parameters.items()}
        load_moments(self._optimizer, names, load_tensor, counters.updates)
        load_scaler(self._accelerator.scaler, counters)
