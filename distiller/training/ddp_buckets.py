"""DDP's gradient buckets, brought to their final order before the first update."""

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
def leaving_no_trace(student: nn.Module, device: torch.device) -> Iterator[None]:
    """For a forward and a backward pass with a loss of zero before the first update, after which nothing has changed.

    DDP packs gradients into buckets in the reverse order of registration, and after the first backward pass into
    others, in the order in which gradients became ready. An element's place in its bucket decides in which order the
    ranks' values are added, so with three ranks or more the last bits of a resumed run's first update, made with the
    first buckets, would differ from an unbroken run's. After one pass every start makes it with the final ones.

    Gradients, buffers (BatchNorm's) and random states are as before; the optimizer has not seen anything.
    """
    buffers = [(buffer, buffer.clone()) for buffer in student.buffers()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    student.zero_grad(set_to_none=True)
