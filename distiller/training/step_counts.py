"""One small sum over ranks an update, and what the host learns from it without waiting for the GPU."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import final

import torch
from accelerate import Accelerator
from torch import Tensor


@dataclass(frozen=True)
class StepCounts:
    """What the sum of update `step` said, the same on every rank; step 0 where nothing has been heard yet.

    Attributes:
        num_bad: ranks on which the update before it, `step` - 1, was bad.
        num_asked: ranks that had been asked to stop.
        is_time: whether a checkpoint was due by rank 0's clock.
    """

    step: int = 0
    num_bad_ranks: int = 0
    num_stop_requests: int = 0
    is_checkpoint_due: bool = False


@final
class StepCountReducer:
    """The count that an update's loss is divided by, with three flags beside it: no collective of their own is needed.

    On the CPU the host hears an update's sum at once. On a GPU it hears that of the update before: by then the GPU has
    long begun the update, so the host waits only where it is a whole update ahead, and the GPU is never idle for it.
    Either way all ranks hear the same after the same update.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._on_gpu = accelerator.device.type == "cuda"
        self._copies: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()

    def reduce(
        self, step: int, count: float, was_bad: Tensor, is_stop_requested: bool, is_checkpoint_due: bool
    ) -> tuple[Tensor, StepCounts]:
        """Sums over ranks: the count, as a float32 scalar on the device, and what the host heard. Communicates.

        Args:
            step: of the update that begins.
            count: of this rank's part of the update.
            was_bad: float32 scalar on the device: 1 where this rank's update before was bad.
            is_asked: whether this rank has been asked to stop.
            is_time: whether a checkpoint is due by this rank's clock; only rank 0's counts.
        """
        # full, not tensor: a copy from the host would wait for all work that is queued on the GPU.
        is_checkpoint_due = is_checkpoint_due and self._accelerator.is_main_process
        own = [
            torch.full((), float(value), device=self._accelerator.device)
            for value in (count, is_stop_requested, is_checkpoint_due)
        ]
        total = self._accelerator.reduce(torch.stack([*own, was_bad]), "sum")
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
    _, num_stop_requests, num_timely, num_bad_ranks = total.tolist()
    return StepCounts(step, int(num_bad_ranks), int(num_stop_requests), num_timely > 0)
