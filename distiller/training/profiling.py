"""Profiles chosen updates with torch.profiler: a trace, a table of kernels, and one line on what bounds the update."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, final

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile, schedule

from distiller.distributed.ranks import Ranks
from distiller.training.time_shares import Interval, TimeShares, kernel_kind, operator_kind, time_shares

FOLDER = "profile"
"""In the output folder."""
NUM_ROWS = 30
"""Of the table of kernels."""


@final
class StepProfiler:
    """Profiles the updates `steps` (first, last) on every rank; does nothing for None.

    Writes `profile/steps-FIRST-LAST-rank-R.json.gz` (a trace, for Perfetto or chrome://tracing) on every rank, and
    `profile/steps-FIRST-LAST.txt` (a table) on rank 0, which prints a line. The update before the first is a warm-up,
    if there is one. Profiled updates are slower. Does not communicate.
    """

    def __init__(self, steps: tuple[int, int] | None, output_dir: Path, ranks: Ranks, first_step: int) -> None:
        """`first_step` of the session: updates before it are not profiled any more."""
        self._steps, self._ranks, self._folder = steps, ranks, output_dir / FOLDER
        self._first = 0 if steps is None else max(steps[0], first_step)
        self._warm_up = int(self._first > first_step)
        self._profiler: Any = None

    def begin(self, step: int) -> None:
        """Before update `step`."""
        if self._steps is None or self._profiler is not None or step != self._first - self._warm_up:
            return
        if step > self._steps[1]:
            return
        # The profiler's own lines on its start and end.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        on_gpu = self._ranks.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        active = self._steps[1] - self._first + 1
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=self._warm_up, active=active, repeat=1),
            # Without it torch 2.11 warns of events of earlier cycles, of which there are none.
            acc_events=True,
        )
        self._profiler.start()

    def end(self, step: int) -> None:
        """After update `step`; after the last one it writes the files, for which the host waits for the device."""
        if self._profiler is None or self._steps is None:
            return
        if step < self._steps[1]:
            self._profiler.step()
            return
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)
        self._profiler.stop()
        self._write()
        self._profiler, self._steps = None, None

    def close(self) -> None:
        """Ends a profile without its files, where an update failed."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write(self) -> None:
        assert self._steps is not None
        on_gpu, name = self._ranks.device.type == "cuda", f"steps-{self._first}-{self._steps[1]}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._folder / f"{name}-rank-{self._ranks.rank}.json.gz"))
            if not self._ranks.is_main:
                return
            order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
            table = self._profiler.key_averages().table(sort_by=order, row_limit=NUM_ROWS, max_name_column_width=90)
            line = str(shares_of(self._profiler.events(), on_gpu))
            (self._folder / f"{name}.txt").write_text(f"{line}\n\n{table}\n", encoding="utf-8")
        except OSError as error:
            print(f"warning: {self._folder}: the profile was not written ({error})", file=sys.stderr)
            return
        print(f"profile of steps {self._first} to {self._steps[1]}: {line}; see {self._folder}", file=sys.stderr)


def shares_of(events: Any, on_gpu: bool) -> TimeShares:
    """What took the time of the profiled updates, from torch.profiler's events."""
    updates, waits, work, cpu_us = [], [], [], 0.0
    for event in events:
        interval = Interval(event.time_range.start, event.time_range.end)
        if event.name.startswith("ProfilerStep"):
            # Its range on the device is the same update's once more.
            if event.device_type == DeviceType.CPU:
                updates.append(interval)
        elif event.name == "data":
            waits.append(interval)
        elif on_gpu and event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            work.append((kernel_kind(event.name), interval))
        elif not on_gpu and event.name.startswith("aten::") and event.self_cpu_time_total:
            # Operators contain each other: each counts with the time that is its own, one behind the other.
            own = Interval(cpu_us, cpu_us := cpu_us + event.self_cpu_time_total)
            work.append((operator_kind(event.name), own))
    return time_shares(updates, waits, work, on_gpu)
