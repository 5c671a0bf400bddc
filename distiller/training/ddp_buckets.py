"""Brings DDP's gradient buckets into their final order before the first update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def has_buckets(student: nn.Module) -> bool:
    """Whether the student's gradients are reduced in buckets that change after the first backward pass."""
    # torch.compile of the whole model wraps it once more.
    return isinstance(getattr(student, "_orig_mod", student), DistributedDataParallel)


@contextmanager
def without_side_effects(student: nn.Module, device: torch.device) -> Iterator[None]:
    """For one forward and backward pass before the first update, with a loss of zero: restores all state afterwards.

    DDP fills its first buckets in reverse order of registration, and rebuilds them after the first backward pass in the
    order in which gradients became ready. The bucket layout decides in which order the ranks' values are added. So with
    three ranks or more, the first update of a resumed run would differ in its last bits from that of an uninterrupted
    run. After this pass every session makes its first update with the final buckets.

    Restores buffers and random states and clears gradients; the optimizer is not involved.
    """
    buffers = [(buffer, buffer.clone()) for buffer in student.buffers()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    student.zero_grad(set_to_none=True)
