"""One process, or DDP: every rank holds everything, and a share of it is its own to save and to average."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from distiller.student_state.base import Counters, Kind, Piece, Read, StudentState
from distiller.student_state.module import SavedTensors


class PlainState(StudentState):
    """Rank r of n has the elements r/n to (r + 1)/n of all parameters laid end to end, and rank 0 the buffers.

    DDP hands rank 0's buffers to the others before every forward pass, so those are the ones that count.
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
        offset = 0
        for name, parameter in self._saved.parameters.items():
            start, stop = max(first - offset, 0), min(last - offset, parameter.numel())
            offset += parameter.numel()
            source = parameter.detach() if kind == "weights" else self._moment(parameter, kind)
            if start < stop and source is not None:
                yield Piece(name, start, source.reshape(-1)[start:stop], is_lasting=True)
        if kind == "weights" and rank == 0:
            yield from self._saved.buffer_pieces()

    def counters(self) -> Counters:
        """See StudentState."""
        scaler = self._accelerator.scaler
        # All parameters step together: one is asked, since reading a number waits for the GPU.
        state = next(iter(self._optimizer.state.values()), None)
        return Counters(0 if state is None else int(state["step"]), {} if scaler is None else scaler.state_dict())

    def load(self, read: Read, counters: Counters) -> None:
        """See StudentState. Does not communicate."""
        with torch.no_grad():
            for name, tensor in self._saved.tensors.items():
                tensor.copy_(read("weights", name, 0, tensor.numel()).view(tensor.shape))
        moments: dict[int, dict[str, Tensor]] = {}
        ordered = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        names = {id(parameter): name for name, parameter in self._saved.parameters.items()}
        if counters.updates:
            for number, parameter in enumerate(ordered):
                name = names[id(parameter)]
                kinds: tuple[Kind, Kind] = ("exp_avg", "exp_avg_sq")
                first, second = (read(kind, name, 0, parameter.numel()).view(parameter.shape) for kind in kinds)
                step = torch.tensor(float(counters.updates))
                moments[number] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
        # Through the optimizer's own door, which puts each tensor where its kernels want it.
        self._optimizer.load_state_dict(self._optimizer.state_dict() | {"state": moments})
        scaler = self._accelerator.scaler
        if scaler is not None:
            held = scaler.state_dict()
            scaler.load_state_dict(held | {k: v for k, v in counters.loss_scale.items() if k in held})

    def _moment(self, parameter: Tensor, kind: Kind) -> Tensor | None:
        if not self._optimizer.state or not parameter.requires_grad:
            return None
        state = self._optimizer.state.get(parameter)
        # A parameter that no loss has reached yet has no moments, and zeros say the same.
        return torch.zeros_like(parameter) if state is None else state[kind]
