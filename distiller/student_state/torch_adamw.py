"""The state of torch's AdamW: what one process, DDP, FSDP1 and FSDP2 share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distiller.student_state.base import Counters, Kind


class MomentsOf:
    """One kind of moment, parameter by parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: Kind) -> None:
        self._state, self._kind = optimizer.state, kind

    def of(self, tensor: Tensor) -> Tensor | None:
        """The moment, like the parameter; None before the first update, and for what is not trained."""
        if not self._state or not isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
            return None
        state = self._state.get(tensor)
        # A parameter that no loss has reached yet has no moments, and zeros say the same.
        return torch.zeros_like(tensor).detach() if state is None else state[self._kind]


def read_counters(optimizer: torch.optim.Optimizer, scaler: Any) -> Counters:
    """All parameters step together: one is asked, since reading a number waits for the GPU."""
    state = next(iter(optimizer.state.values()), None)
    return Counters(0 if state is None else int(state["step"]), {} if scaler is None else scaler.state_dict())


def load_moments(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    fill: Callable[[Kind, str, Tensor], None],
    updates: int,
) -> None:
    """Gives the optimizer the moments of every parameter that `names` knows by its id; none where `updates` is 0.

    `fill` puts the saved values of a kind and a name into a tensor that is shaped and placed like the parameter.
    """
    moments: dict[int, dict[str, Tensor]] = {}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(ordered if updates else ()):
        if (name := names.get(id(parameter))) is None:
            continue
        first, second = torch.zeros_like(parameter).detach(), torch.zeros_like(parameter).detach()
        fill("exp_avg", name, first)
        fill("exp_avg_sq", name, second)
        moments[number] = {"step": torch.tensor(float(updates)), "exp_avg": first, "exp_avg_sq": second}
    # Through the optimizer's own door, which puts each tensor where its kernels want it.
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})


def load_scaler(scaler: Any, counters: Counters) -> None:
    """Gives fp16's scaler, if there is one, what was saved of it; a run in another precision saved nothing."""
    if scaler is not None:
        held = scaler.state_dict()
        scaler.load_state_dict(held | {key: value for key, value in counters.loss_scale.items() if key in held})
