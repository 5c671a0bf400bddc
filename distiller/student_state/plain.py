"""One process, or DDP: every rank holds everything, and a share of it is its own to save and to average."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from distiller.student_state.base import Counters, Kind, Piece, Read, StudentState


class PlainState(StudentState):
    """Rank r of n has the elements r/n to (r + 1)/n of all tensors laid end to end."""

    def __init__(self, accelerator: Accelerator, student: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._accelerator, self._optimizer = accelerator, optimizer
        self._module = accelerator.unwrap_model(student, keep_torch_compile=False)
        self._parameters = dict(self._module.named_parameters())
        self._tensors = dict(saved_tensors(self._module))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See StudentState."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def pieces(self, kind: Kind) -> Iterator[Piece]:
        """See StudentState; views of the live tensors. Does not communicate."""
        total = sum(tensor.numel() for tensor in self._tensors.values())
        rank, count = self._accelerator.process_index, self._accelerator.num_processes
        first, last = total * rank // count, total * (rank + 1) // count
        offset = 0
        for name, tensor in self._tensors.items():
            start, stop = max(first - offset, 0), min(last - offset, tensor.numel())
            offset += tensor.numel()
            source = tensor.detach() if kind == "weights" else self._moment(name, kind)
            if start < stop and source is not None:
                yield Piece(name, start, source.reshape(-1)[start:stop])

    def counters(self) -> Counters:
        """See StudentState."""
        scaler = self._accelerator.scaler
        steps = [int(state["step"]) for state in self._optimizer.state.values()]
        return Counters(max(steps, default=0), {} if scaler is None else scaler.state_dict())

    def load(self, read: Read, counters: Counters) -> None:
        """See StudentState. Does not communicate."""
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(read("weights", name, 0, tensor.numel()).view(tensor.shape))
        moments: dict[int, dict[str, Tensor]] = {}
        ordered = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        if counters.updates:
            for number, parameter in enumerate(ordered):
                name = names[id(parameter)]
                values = [read(kind, name, 0, parameter.numel()) for kind in ("exp_avg", "exp_avg_sq")]
                first, second = (value.view(parameter.shape) for value in values)
                step = torch.tensor(float(counters.updates))
                moments[number] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
        # Through the optimizer's own door, which puts each tensor where its kernels want it.
        self._optimizer.load_state_dict(self._optimizer.state_dict() | {"state": moments})
        if self._accelerator.scaler is not None and counters.loss_scale:
            self._accelerator.scaler.load_state_dict(counters.loss_scale)

    def _moment(self, name: str, kind: Kind) -> Tensor | None:
        parameter = self._parameters.get(name)
        state = {} if parameter is None else self._optimizer.state.get(parameter, {})
        return state.get(kind)


def saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and persistent buffer of a module by its first name, in the module's order."""
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor
