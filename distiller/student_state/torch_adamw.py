"""Reads and loads the state of torch's AdamW, for one process, DDP, FSDP1 and FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from distiller.student_state.base import Counters, Kind


@final
class Moments:
    """The moments of one kind (`exp_avg` or `exp_avg_sq`), by parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: Kind) -> None:
        self._state, self._kind = optimizer.state, kind

    def get(self, tensor: Tensor) -> Tensor | None:
        """The moment, shaped and placed like the parameter; None before the first update, or for a frozen parameter."""
        if not self._state or not isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
            return None
        state = self._state.get(tensor)
        # A parameter that has had no gradient yet has no moments, which is the same as zeros.
        return torch.zeros_like(tensor).detach() if state is None else state[self._kind]


def read_counters(optimizer: torch.optim.Optimizer, scaler: Any) -> Counters:
    """The step count of one parameter (all are equal, and each read may wait for the GPU), and the scaler's state."""
    state = next(iter(optimizer.state.values()), None)
    return Counters(0 if state is None else int(state["step"]), {} if scaler is None else scaler.state_dict())


def load_moments(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    load_tensor: Callable[[Kind, str, Tensor], None],
    updates: int,
) -> None:
    """Loads the moments of the parameters in `names` (id -> name) into the optimizer; none if `updates` is 0.

    `load_tensor` copies the saved values of a kind and a name into a tensor shaped and placed like the parameter.
    """
    moments: dict[int, dict[str, Tensor]] = {}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for i, parameter in enumerate(ordered if updates else ()):
        if (name := names.get(id(parameter))) is None:
            continue
        first, second = torch.zeros_like(parameter).detach(), torch.zeros_like(parameter).detach()
        load_tensor("exp_avg", name, first)
        load_tensor("exp_avg_sq", name, second)
        moments[i] = {"step": torch.tensor(float(updates)), "exp_avg": first, "exp_avg_sq": second}
    # `load_state_dict` moves each tensor to the device that the optimizer's kernels need.
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})


def load_scaler(scaler: Any, counters: Counters) -> None:
    """Loads the saved state into fp16's scaler, if there is one; a run in another precision has saved none."""
    if scaler is not None:
        state = scaler.state_dict()
        scaler.load_state_dict(state | {key: value for key, value in counters.loss_scale.items() if key in state})
