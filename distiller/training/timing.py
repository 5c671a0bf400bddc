"""Time of the parts of a step: by events on a GPU, without synchronisation until they are read; else by the clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch

PARTS = ("data", "teacher", "student", "optimizer")


def parts_of_update(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Part of an update -> its share of the update's time, the longest first, from logged metrics.

    Parts that overlap add up to more than 1; those that were not measured are left out.
    """
    times = {name: metrics.get(f"perf/{name}_ms") for name in PARTS}
    shares = {name: ms / metrics["perf/step_ms"] for name, ms in times.items() if ms}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


@final
class StepTimer:
    """Adds up the time of named parts of the steps since the last `read`.

    On a GPU a part is the time between two events on the current stream; `data` is always the host's waiting time.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        # Another thread may append to both.
        self._host_s: deque[tuple[str, float]] = deque()
        self._events: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._steps, self._started = 0, time.perf_counter()
        self._windows: list[tuple[int, float]] = []
        self.current_part: str | None = None
        """The one that goes on, or that an exception has ended."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measures a part, which a profile shows under its name; parts do not nest."""
        self.current_part = name
        with self.measured(name):
            yield
        self.current_part = None

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """As `part`, in another thread than the loop's."""
        with torch.profiler.record_function(name):
            yield from self._measured(name)

    @contextmanager
    def waiting_for(self, name: str) -> Iterator[None]:
        """Names a part while the host waits for it, and measures nothing."""
        self.current_part = name
        yield
        self.current_part = None

    def _measured(self, name: str) -> Iterator[None]:
        if self._on_gpu and name != "data":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            started = time.perf_counter()
            yield
            self._host_s.append((name, time.perf_counter() - started))

    def end_step(self) -> None:
        """Counts a step."""
        self._steps += 1

    def read(self, *, counts: bool = True) -> dict[str, float]:
        """Mean milliseconds of a step and of each part. On a GPU the host waits for it; then call `restart`.

        `counts`: whether `timed` is to include the window.
        """
        recorded = [self._events.popleft() for _ in range(len(self._events))]
        # Events of one stream complete in order. Those of the student's have no time before the last is complete; a
        # teacher that is asked ahead may need longer, and counts in the next window.
        for end in [end for name, _, end in recorded if name != "teacher"][-1:]:
            end.synchronize()
        totals: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for name, seconds in [self._host_s.popleft() for _ in range(len(self._host_s))]:
            totals[name] += 1e3 * seconds
        for name, begin, end in recorded:
            if end.query():
                totals[name] += begin.elapsed_time(end)
            else:
                self._events.append((name, begin, end))
        steps, elapsed_s = max(self._steps, 1), time.perf_counter() - self._started
        if counts:
            self._windows.append((steps, elapsed_s))
        return {"step": 1e3 * elapsed_s / steps, **{name: total / steps for name, total in totals.items()}}

    def restart(self) -> None:
        """Begins a new window; the time since `read` (logging, a checkpoint) is not counted."""
        self._steps, self._started = 0, time.perf_counter()

    def discard(self) -> None:
        """Begins a new window; the steps since `restart` are not counted either."""
        self._host_s.clear()
        self._events.clear()
        self.restart()

    def timed(self) -> tuple[int, float]:
        """Steps and seconds of all windows that were read; without the first (warm-up) where there are others."""
        windows = self._windows[1:] or self._windows
        return sum(steps for steps, _ in windows), sum(elapsed_s for _, elapsed_s in windows)
