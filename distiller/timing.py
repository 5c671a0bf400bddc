"""Where a step's time goes, without synchronisation: events on a GPU, clocks on a CPU."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PARTS = ("data", "teacher", "student", "optimizer")


class StepTimer:
    """Adds up the time of named parts of the steps since the last `read`.

    On a GPU a part is the time between two events on the current stream, read when the caller has synchronised anyway
    (it logs a loss); `data` is always the host's waiting time.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._host_s: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._steps, self._started = 0, time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measures a part; parts do not nest."""
        if self._on_gpu and name != "data":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            started = time.perf_counter()
            yield
            self._host_s[name] += time.perf_counter() - started

    def end_step(self) -> None:
        """Counts a step."""
        self._steps += 1

    def read(self) -> dict[str, float]:
        """Mean milliseconds a step, of the whole step and of each part; starts anew. Call after a synchronisation."""
        totals = {name: 1e3 * self._host_s[name] for name in PARTS}
        for name, begin, end in self._events:
            totals[name] += begin.elapsed_time(end)
        steps, now = max(self._steps, 1), time.perf_counter()
        report = {
            "step": 1e3 * (now - self._started) / steps,
            **{name: total / steps for name, total in totals.items()},
        }
        self._host_s.clear()
        self._events.clear()
        self._steps, self._started = 0, now
        return report
