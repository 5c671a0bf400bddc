"""A few buffers on the device that hold a teacher's blocks in turn; the next blocks are copied while one computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(eq=False)
class BlockBuffer:
    """Memory for one block.

    Attributes:
        data: uint8 [bytes] on the device.
        unit: index of the unit that is in it, or is being copied into it; -1 at first.
        last_use: recorded after the last kernel that reads it; None on the CPU.
    """

    data: Tensor
    unit: int = -1
    last_use: torch.cuda.Event | None = None


class Copier(ABC):
    """Copies units into buffers, in the order in which they are started."""

    @abstractmethod
    def start(self, buffer: BlockBuffer) -> None:
        """Begins to copy the unit `buffer.unit` into the buffer, after `buffer.last_use`. Does not wait."""

    @abstractmethod
    def wait(self, buffer: BlockBuffer) -> None:
        """Makes the current stream (on the CPU: the caller) wait until the copy is complete."""

    @abstractmethod
    def close(self) -> None:
        """Waits for copies in flight and frees what the copier holds."""


@final
class BufferPool:
    """Copies units ahead in the order of a schedule.

    A buffer becomes free when the next unit is acquired, and the next copy starts then. Acquiring a unit that is not in
    the schedule, or skipping one, costs time but never returns a wrong buffer: each buffer knows its unit.
    """

    def __init__(self, buffers: Sequence[BlockBuffer], copier: Copier) -> None:
        self._free, self._in_flight = deque(buffers), deque[BlockBuffer]()
        self._upcoming = deque[int]()
        self._current: BlockBuffer | None = None
        self._copier = copier

    def schedule(self, units: Sequence[int], then: Sequence[int]) -> None:
        """Sets the indices of the units that are needed next, and (`then`) of those that probably follow."""
        num_kept = 0
        while num_kept < min(len(units), len(self._in_flight)) and self._in_flight[num_kept].unit == units[num_kept]:
            num_kept += 1
        while len(self._in_flight) > num_kept:
            self._free.append(self._in_flight.pop())
        self._upcoming = deque([*units[num_kept:], *then])
        self._start_copies()

    def acquire(self, unit: int) -> BlockBuffer:
        """The buffer that holds the unit; the current stream waits for it. Releases the unit acquired before."""
        if self._current is not None and self._current.unit == unit:
            return self._current
        self.release()
        self._skip_to(unit)
        buffer = self._in_flight.popleft()
        # Wait before `_current` is set: a buffer whose copy failed must not be returned by the next call.
        self._copier.wait(buffer)
        self._current = buffer
        return buffer

    def release(self) -> None:
        """Frees the buffer acquired last for the next copy."""
        if self._current is None:
            return
        if self._current.last_use is not None:
            self._current.last_use.record()
        self._free.append(self._current)
        self._current = None
        self._start_copies()

    def close(self) -> None:
        """Waits for copies in flight and frees the buffers."""
        self._copier.close()
        self._free.clear()
        self._in_flight.clear()
        self._upcoming.clear()
        self._current = None

    def _skip_to(self, unit: int) -> None:
        """Makes this unit the first in flight: frees the buffers of units before it, or starts its copy now."""
        while self._in_flight and self._in_flight[0].unit != unit:
            self._free.append(self._in_flight.popleft())
        if self._in_flight:
            return
        while self._upcoming and self._upcoming[0] != unit and unit in self._upcoming:
            self._upcoming.popleft()
        if not self._upcoming or self._upcoming[0] != unit:
            self._upcoming.appendleft(unit)
        self._start_copies()

    def _start_copies(self) -> None:
        while self._free and self._upcoming:
            buffer = self._free.popleft()
            buffer.unit = self._upcoming.popleft()
            self._copier.start(buffer)
            self._in_flight.append(buffer)
