"""Several runs beside each other: what differs in their recipes, and how they came out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distiller.report.facts import differing_settings, gpus_of, state_of, throughput
from distiller.report.markup import Markup, element, table
from distiller.report.numbers import duration, is_number, shown
from distiller.report.quality import scalars
from distiller.report.run_files import RunFiles

SIZES = ("params", "parameters", "num_samples", "batch_size")
"""Words of figures that describe an evaluation and judge nothing."""


def comparison_tables(runs: Sequence[RunFiles]) -> Iterator[Markup]:
    """A column for each run: first what differs in the recipes, then the results."""
    names = [run.name for run in runs]
    if settings := differing_settings(runs):
        yield table("What differs in the recipes", ("key", *names), settings)
    else:
        yield element("p", "The recipes do not differ.")
    yield table("Results", ("figure", *names), [row for row in _results(runs) if any(row[1:])])


def _results(runs: Sequence[RunFiles]) -> Iterator[list[str]]:
    yield ["state", *(state_of(run) for run in runs)]
    yield ["newest loss", *(_shown(run.last("loss")) for run in runs)]
    for name in dict.fromkeys(name for run in runs for name in run.metric_names() if name.startswith("eval/")):
        yield [f"newest {name}", *(_shown(run.last(name)) for run in runs)]
    yield ["updates/s", *(_shown(_per_second(run)) for run in runs)]
    yield ["time of an update, ms, median", *(_shown(run.settled("perf/step_ms")) for run in runs)]
    yield ["samples/s", *(_shown(throughput(run)) for run in runs)]
    yield ["peak of GPU memory, GiB", *(_shown(run.last("memory/gpu_peak_gib")) for run in runs)]
    yield ["teacher's weights on a GPU, GiB", *(_shown(run.last("memory/teacher_gpu_gib") or None) for run in runs)]
    yield ["teacher's weights on the host, GiB", *(_shown(run.last("memory/teacher_host_gib") or None) for run in runs)]
    yield ["peak of host memory, GiB", *(_shown(run.last("memory/host_peak_gib")) for run in runs)]
    newest = [found[-1][1] if (found := run.reports()) else {} for run in runs]
    for name in dict.fromkeys(name for report in newest for name in scalars(report)):
        if not name.endswith(SIZES):
            yield [name.replace("_", " "), *(_shown(report.get(name)) for report in newest)]
    yield ["student's parameters", *(_shown(run.summary.get("student_params")) for run in runs)]
    yield ["skipped updates", *(_shown(run.last("optim/skipped_steps")) for run in runs)]
    yield ["took", *(_took(run) for run in runs)]
    yield ["placement", *(_shown(run.summary.get("placement")) for run in runs)]
    yield ["engine", *(_shown(run.summary.get("engine") or run.session.get("engine")) for run in runs)]
    yield ["processes", *(_shown(run.summary.get("world_size") or run.session.get("world_size")) for run in runs)]
    yield ["GPUs", *(gpus_of(run.session) for run in runs)]
    yield ["host", *(_shown(run.session.get("host")) for run in runs)]


def _per_second(run: RunFiles) -> float | None:
    step_ms = run.settled("perf/step_ms")
    return 1e3 / step_ms if step_ms else None


def _took(run: RunFiles) -> str:
    seconds = run.summary.get("wall_s")
    return duration(seconds) if is_number(seconds) else ""


def _shown(value: object) -> str:
    """Empty where it is not known: a row without any value is left out."""
    return "" if value is None else shown(value)
