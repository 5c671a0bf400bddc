"""Memory by its owners, and what was predicted of memory and time beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from distiller.report.charts import Chart, Line
from distiller.report.numbers import is_number
from distiller.report.run_files import RunFiles
from distiller.report.training_charts import UPDATE, line_of

OVER_TIME = (
    ("memory/gpu_peak_gib_max", "GPU peak, fullest rank"),
    ("memory/gpu_peak_gib_min", "GPU peak, emptiest rank"),
    ("memory/teacher_gpu_gib", "teacher's weights on a GPU"),
    ("memory/prefetched_gib", "teacher's answers ahead"),
    ("memory/teacher_host_gib", "teacher's weights on the host"),
    ("memory/host_rss_gib", "rank 0's process on the host"),
    ("memory/host_peak_gib", "host peak, largest process"),
)
NOTABLE = 0.10
"""From this relative difference on a prediction was off."""


@final
class Prediction(tuple[str, str, float | None, float | None]):
    """What is predicted, its unit, the prediction and the measurement."""

    __slots__ = ()

    @property
    def difference(self) -> float | None:
        """How far the prediction lies above the measurement, relative to it; None where one of them is unknown."""
        _, _, expected, measured = self
        return None if expected is None or not measured else (expected - measured) / measured

    @property
    def is_off(self) -> bool:
        """Whether the difference is notable."""
        return self.difference is not None and abs(self.difference) > NOTABLE


def predictions(run: RunFiles) -> list[Prediction]:
    """Those that the run's summary holds."""
    peak = run.summary.get("gpu_peak_gib")
    measured = {
        "expected_gpu_peak_gib": peak if is_number(peak) else run.last("memory/gpu_peak_gib"),
        "expected_step_ms": run.settled("perf/step_ms"),
    }
    rows = (
        ("expected_gpu_peak_gib", "peak of GPU memory", "GiB"),
        ("expected_step_ms", "time of an update, median", "ms"),
    )
    return [
        Prediction((name, unit, expected, measured[key]))
        for key, name, unit in rows
        if is_number(expected := run.summary.get(key))
    ]


def card_gib(run: RunFiles) -> float | None:
    """Memory of the smallest GPU of the newest session's machine; None without one."""
    gpus = run.session.get("gpus") or []
    sizes = [size for gpu in gpus if isinstance(gpu, dict) and is_number(size := gpu.get("memory_gib"))]
    return min(sizes, default=None)


def memory_charts(run: RunFiles) -> Iterator[Chart]:
    """GPU and host memory by owner, and their course."""
    peak = run.last("memory/gpu_peak_gib_max") or run.last("memory/gpu_peak_gib")
    if peak:
        teacher, ahead = run.last("memory/teacher_gpu_gib") or 0.0, run.last("memory/prefetched_gib") or 0.0
        places = ["fullest rank", "emptiest rank"]
        least = run.last("memory/gpu_peak_gib_min")
        # The emptiest rank's owners are not logged apart.
        owners = [
            Line("teacher's weights", places, [teacher, None]),
            Line("teacher's answers ahead", places, [ahead, None]),
            Line("student, optimizer and activations", places, [max(peak - teacher - ahead, 0.0), None]),
            Line("all owners", places, [None, least]),
        ]
        size = card_gib(run)
        yield Chart(
            "GPU memory by owner, at its peak",
            "GPU",
            "GiB",
            tuple(line for line in owners if any(line.values)),
            "stacked bars",
            "" if size is None else "The dashed line is the memory of a GPU.",
            limit=None if size is None else ("a GPU's memory", size),
            highest=None if size is None else 1.1 * max(size, peak),
        )
    hosts = (
        ("teacher's weights, a machine", run.last("memory/teacher_host_gib")),
        ("rank 0's process, at the end", run.last("memory/host_rss_gib")),
        ("largest process, at its peak", run.last("memory/host_peak_gib")),
    )
    known = [(name, value) for name, value in hosts if value]
    if known:
        line = Line("host memory", [name for name, _ in known], [value for _, value in known])
        total = run.session.get("host_memory_gib")
        note = f"The machine has {total:,.1f} GiB. " if is_number(total) else ""
        note += "A process's memory holds its part of the teacher's."
        yield Chart("Host memory by owner", "owner", "GiB", (line,), "bars", note)
    lines = tuple(line_of(run, metric, name) for metric, name in OVER_TIME if any(run.series(metric)[1]))
    if lines:
        yield Chart("Memory during training", UPDATE, "GiB", lines, from_zero=True)
