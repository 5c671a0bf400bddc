"""One small all-reduce an update: the loss's count and three flags, read by the host without waiting for the GPU."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import final

import torch
from accelerate import Accelerator
from torch import Tensor


@final
@dataclass(frozen=True)
class StepCounts:
    """The flags of one all-reduce, the same on every rank.

    Attributes:
        step: the update that it belongs to; 0 before the host has read the first one.
        num_bad_ranks: ranks on which the previous update, `step` - 1, was bad.
        num_stop_requests: ranks that had received a stop signal.
        is_checkpoint_due: whether a checkpoint was due by rank 0's clock.
    """

    step: int = 0
    num_bad_ranks: int = 0
    num_stop_requests: int = 0
    is_checkpoint_due: bool = False


@final
class StepCountReducer:
    """All-reduces the count that an update's loss is divided by, together with the flags of `StepCounts`.

    On a CPU the host reads the sum at once. On a GPU it reads the previous update's, which the GPU has computed by then
    unless the host is a whole update ahead; the GPU never idles for it. All ranks read the same sum at the same step.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._on_gpu = accelerator.device.type == "cuda"
        self._copies: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()

    def reduce(
        self, step: int, count: float, was_bad: Tensor, is_stop_requested: bool, is_checkpoint_due: bool
    ) -> tuple[Tensor, StepCounts]:
        """Returns the global count (float32 scalar on the device) and the newest flags on the host. Communicates.

        Args:
            step: the update that begins.
            count: of this rank's part of the update.
            was_bad: float32 scalar on the device: 1 where this rank's previous update was bad.
            is_stop_requested: whether this rank has received a stop signal.
            is_checkpoint_due: whether a checkpoint is due by this rank's clock; only rank 0's is used.
        """
        # torch.full, not torch.tensor, whose copy from the host would wait for all work that is queued on the GPU.
        is_checkpoint_due = is_checkpoint_due and self._accelerator.is_main_process
        local = [
            torch.full((), float(value), device=self._accelerator.device)
            for value in (count, is_stop_requested, is_checkpoint_due)
        ]
        total = self._accelerator.reduce(torch.stack([*local, was_bad]), "sum")
        assert isinstance(total, Tensor)
        return total[0], self._read_when_ready(step, total)

    def _read_when_ready(self, step: int, total: Tensor) -> StepCounts:
        if not self._on_gpu:
            return _read(step, total)
        copy = torch.empty(total.shape, dtype=total.dtype, pin_memory=True)
        copy.copy_(total, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._copies.append((step, copy, event))
        if len(self._copies) == 1:
            return StepCounts()
        step, copy, event = self._copies.popleft()
        event.synchronize()
        return _read(step, copy)


def _read(step: int, total: Tensor) -> StepCounts:
    _, num_stop_requests, num_due, num_bad_ranks = total.tolist()
    return StepCounts(step, int(num_bad_ranks), int(num_stop_requests), num_due > 0)
