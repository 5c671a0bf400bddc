"""Resuming is bitwise on four DDP ranks, where the order in which gradients are added shows."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distiller.training.ddp_buckets import without_side_effects
from tests.distributed.ranks import on_ranks

RANKS = 4


class Student(nn.Module):
    """Used in another order than registered, so that the buckets change after the first backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(31, 31) for _ in range(6))
        self.norm = nn.BatchNorm1d(31)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        for number in (3, 0, 5, 1, 4, 2):
            x = torch.tanh(self.layers[number](x))
        return self.dropout(self.norm(x))


def train(state: dict[str, Any] | None, steps: range, settle: bool) -> dict[str, Tensor]:
    """Plain SGD with momentum-free updates: nothing but weights, buffers and dropout's state carries over."""
    torch.manual_seed(0)
    module = Student()
    if state is not None:
        module.load_state_dict(state)
    # 10 kB: several buckets.
    student = DistributedDataParallel(module, bucket_cap_mb=0.01)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    for step in steps:
        x = torch.randn(8, 31, generator=torch.Generator().manual_seed(100 * step + PartialState().process_index))
        if settle and step == steps.start:
            before = {name: value.clone() for name, value in module.state_dict().items()}, torch.get_rng_state()
            with without_side_effects(student, torch.device("cpu")):
                (0.0 * student(x).square().sum()).backward()
            assert all(torch.equal(value, before[0][name]) for name, value in module.state_dict().items())
            assert torch.equal(torch.get_rng_state(), before[1])
            assert all(parameter.grad is None for parameter in student.parameters())
        torch.manual_seed(step)
        student(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in module.state_dict().items()}


def everything() -> dict[str, bool]:
    PartialState(cpu=True)
    equal = {}
    for settle in (False, True):
        whole, half = train(None, range(6), settle), train(None, range(3), settle)
        resumed = train(half, range(3, 6), settle)
        equal["settled" if settle else "as it comes"] = all(torch.equal(whole[name], resumed[name]) for name in whole)
    return equal


def test_one_pass_before_the_first_update_makes_resuming_bitwise():
    """If the first fails, torch has mended it and `without_side_effects` can go."""
    for equal in on_ranks(RANKS, everything, timeout_s=240):
        assert equal == {"as it comes": False, "settled": True}
