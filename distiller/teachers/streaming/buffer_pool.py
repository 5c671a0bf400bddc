"""A few buffers on the device through which a teacher's blocks pass, the next ones on their way while one computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Slot:
    """A buffer [bytes] uint8 on the device, the unit that is in it or on its way, and what follows its last reader."""

    buffer: Tensor
    unit: int = -1
    used: torch.cuda.Event | None = field(default=None)


class Feed(ABC):
    """Brings units into slots, in the order in which they are started."""

    @abstractmethod
    def start(self, slot: Slot) -> None:
        """Begins to bring `slot.unit` into the slot, once `slot.used` has passed. Does not wait."""

    @abstractmethod
    def wait(self, slot: Slot) -> None:
        """Lets the current stream (on the CPU: the caller) wait until the unit is there."""

    @abstractmethod
    def close(self) -> None:
        """Waits for what is under way and frees what the feed holds."""


class Ring:
    """Slots in the order in which their units will be used.

    A slot is free again when the next unit is entered; what comes next is known (`expect`), so its copy starts then. A
    unit that comes unexpectedly, or is left out, costs time and nothing else: slots are found by the unit that is in
    them, never by its number.
    """

    def __init__(self, slots: Sequence[Slot], feed: Feed) -> None:
        self._idle, self._flying = deque(slots), deque[Slot]()
        self._coming, self._current = deque[int](), None
        self._feed = feed

    def expect(self, units: Sequence[int], then: Sequence[int]) -> None:
        """Says which units pass next, and which are likely to follow (the next step's first ones)."""
        kept = 0
        while kept < min(len(units), len(self._flying)) and self._flying[kept].unit == units[kept]:
            kept += 1
        while len(self._flying) > kept:
            self._idle.append(self._flying.pop())
        self._coming = deque([*units[kept:], *then])
        self._start_copies()

    def enter(self, unit: int) -> Slot:
        """The slot that holds the unit; the current stream waits for it. The unit before it is no longer needed."""
        if self._current is not None and self._current.unit == unit:
            return self._current
        self.leave()
        self._skip_to(unit)
        slot = self._flying.popleft()
        # First: a slot whose copy has failed must not look filled.
        self._feed.wait(slot)
        self._current = slot
        return slot

    def leave(self) -> None:
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
        self._flying.clear()
        self._coming.clear()
        self._current = None

    def _skip_to(self, unit: int) -> None:
        while self._flying and self._flying[0].unit != unit:
            self._idle.append(self._flying.popleft())
        if self._flying:
            return
        while self._coming and self._coming[0] != unit and unit in self._coming:
            self._coming.popleft()
        if not self._coming or self._coming[0] != unit:
            self._coming.appendleft(unit)
        self._start_copies()

    def _start_copies(self) -> None:
        while self._idle and self._coming:
            slot = self._idle.popleft()
            slot.unit = self._coming.popleft()
            self._feed.start(slot)
            self._flying.append(slot)
