"""A few buffers on the device through which a teacher's blocks pass, the next ones on their way while one computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class BlockBuffer:
    """A buffer [bytes] uint8 on the device, the unit that is in it or on its way, and what follows its last reader."""

    buffer: Tensor
    unit: int = -1
    used: torch.cuda.Event | None = field(default=None)


class Copier(ABC):
    """Brings units into slots, in the order in which they are started."""

    @abstractmethod
    def start(self, slot: BlockBuffer) -> None:
        """Begins to bring `slot.unit` into the slot, once `slot.used` has passed. Does not wait."""

    @abstractmethod
    def wait(self, slot: BlockBuffer) -> None:
        """Lets the current stream (on the CPU: the caller) wait until the unit is there."""

    @abstractmethod
    def close(self) -> None:
        """Waits for what is under way and frees what the feed holds."""


class BufferPool:
    """Slots in the order in which their units will be used.

    A slot is free again when the next unit is entered; what comes next is known (`expect`), so its copy starts then. A
    unit that comes unexpectedly, or is left out, costs time and nothing else: slots are found by the unit that is in
    them, never by its number.
    """

    def __init__(self, slots: Sequence[BlockBuffer], feed: Copier) -> None:
        self._idle, self._in_flight = deque(slots), deque[BlockBuffer]()
        self._upcoming, self._current = deque[int](), None
        self._feed = feed

    def schedule(self, units: Sequence[int], then: Sequence[int]) -> None:
        """Says which units pass next, and which are likely to follow (the next step's first ones)."""
        kept = 0
        while kept < min(len(units), len(self._in_flight)) and self._in_flight[kept].unit == units[kept]:
            kept += 1
        while len(self._in_flight) > kept:
            self._idle.append(self._in_flight.pop())
        self._upcoming = deque([*units[kept:], *then])
        self._start_copies()

    def acquire(self, unit: int) -> BlockBuffer:
        """The slot that holds the unit; the current stream waits for it. The unit before it is no longer needed."""
        if self._current is not None and self._current.unit == unit:
            return self._current
        self.release()
        self._skip_to(unit)
        slot = self._in_flight.popleft()
        # First: a slot whose copy has failed must not look filled.
        self._feed.wait(slot)
        self._current = slot
        return slot

    def release(self) -> None:
        """The last unit entered is no longer needed; its slot is filled anew."""
        if self._current is None:
            return
        if self._current.used is not None:
            self._current.used.record()
        self._idle.append(self._current)
        self._current = None
        self._start_copies()

    def close(self) -> None:
        """Waits for copies under way and lets the buffers go."""
        self._feed.close()
        self._idle.clear()
        self._in_flight.clear()
        self._upcoming.clear()
        self._current = None

    def _skip_to(self, unit: int) -> None:
        while self._in_flight and self._in_flight[0].unit != unit:
            self._idle.append(self._in_flight.popleft())
        if self._in_flight:
            return
        while self._upcoming and self._upcoming[0] != unit and unit in self._upcoming:
            self._upcoming.popleft()
        if not self._upcoming or self._upcoming[0] != unit:
            self._upcoming.appendleft(unit)
        self._start_copies()

    def _start_copies(self) -> None:
        while self._idle and self._upcoming:
            slot = self._idle.popleft()
            slot.unit = self._upcoming.popleft()
            self._feed.start(slot)
            self._in_flight.append(slot)
