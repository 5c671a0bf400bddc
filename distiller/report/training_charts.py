"""Charts of what was logged during training: losses, rates, times and throughput, of one run or of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distiller.report.charts import Chart, Line
from distiller.report.numbers import shown
from distiller.report.run_files import RunFiles

UPDATE = "update"
TIME_PARTS = (
    ("perf/teacher_ms", "teacher"),
    ("perf/student_ms", "student"),
    ("perf/optimizer_ms", "optimizer"),
    ("perf/data_ms", "data"),
)
NAMED = {
    "lr": ("Learning rate", "learning rate"),
    "grad_norm": ("Gradient norm before clipping", "L2 norm"),
    "optim/loss_scale": ("Loss scale of fp16", "factor"),
    "optim/skipped_steps": ("Skipped updates so far", "updates"),
    "perf/samples_per_s": ("Throughput", "samples/s"),
    "perf/tokens_per_s": ("Throughput in tokens", "tokens/s"),
    "perf/mfu": ("Use of the GPU's peak by the student's FLOP", "share of the peak, 0 to 1"),
}
"""Metric -> title and unit."""
LOGARITHMIC = ("loss", "grad_norm", "eval/")
FROM_ZERO = ("lr", "perf/", "memory/", "optim/")
"""Beginnings of the names of metrics whose axis may be logarithmic, and of those whose axis begins at 0."""
ELSEWHERE = ("step", "epoch", "samples", "perf/step_ms", "perf/step_ms_min", "perf/step_ms_max")
SPIKE = 2.0
"""The first logged time is cut off where it is so many times longer than the others."""


def line_of(run: RunFiles, metric: str, name: str | None = None) -> Line:
    """A metric over the run's updates; `name`: of the line, the metric's own by default."""
    steps, values = run.series(metric)
    return Line(name or metric, steps, values)


def loss_charts(run: RunFiles) -> Iterator[Chart]:
    """The training loss with its terms, and the held-out loss with those of its parts."""
    for title, loss in (("Training loss", "loss"), ("Held-out loss", "eval/loss")):
        # A single term is the loss itself.
        terms = [
            name for name in run.metric_names() if name.startswith(f"{loss}/") and run.series(name) != run.series(loss)
        ]
        lines = tuple(line_of(run, name) for name in (loss, *terms) if run.last(name) is not None)
        if lines:
            yield Chart(title, UPDATE, "loss", lines, may_be_logarithmic=True)


def other_charts(run: RunFiles) -> Iterator[tuple[str, Chart]]:
    """Metric and chart of learning rate, gradient norm, throughput, and of any further metric."""
    names = run.metric_names()
    losses = {name for name in names if name == "loss" or name.startswith(("loss/", "eval/loss"))}
    left_out = {*losses, *ELSEWHERE, *(f"{name}{end}" for name, _ in TIME_PARTS for end in ("", "_min", "_max"))}
    for name in sorted(names, key=lambda name: list(NAMED).index(name) if name in NAMED else len(NAMED)):
        if name in left_out or name.startswith("memory/") or not _is_worth_drawing(run, name):
            continue
        title, unit = NAMED.get(name, (name, name))
        is_logarithmic = name.startswith(LOGARITHMIC)
        line = line_of(run, name)
        yield (
            name,
            Chart(
                title, UPDATE, unit, (line,), may_be_logarithmic=is_logarithmic, from_zero=name.startswith(FROM_ZERO)
            ),
        )


def _is_worth_drawing(run: RunFiles, name: str) -> bool:
    _, values = run.series(name)
    if name == "optim/skipped_steps":
        return any(values)
    samples = run.series("perf/samples_per_s")[1]
    if name != "perf/tokens_per_s" or len(samples) != len(values):
        return True
    # With the same number of tokens in every sample its curve is that of the samples.
    ratios = [tokens / count for tokens, count in zip(values, samples, strict=True) if count]
    return bool(ratios) and max(ratios) > 1.001 * min(ratios)


def time_charts(run: RunFiles) -> Iterator[Chart]:
    """The parts of an update's time, stacked, and the whole time over the ranks; then each part's slowest rank."""
    lines = [line_of(run, metric, name) for metric, name in TIME_PARTS]
    totals = [
        Line(name, *run.series(metric), is_total=True)
        for metric, name in (
            ("perf/step_ms", "whole update, mean of the ranks"),
            ("perf/step_ms_min", "fastest rank"),
            ("perf/step_ms_max", "slowest rank"),
        )
    ]
    if not totals[0].values:
        return
    if totals[1].values == totals[2].values:
        totals = totals[:1]
    # Areas are stacked at the same positions.
    steps = totals[0].positions
    parts = [
        Line(line.name, steps, [known.get(step, 0.0) for step in steps])
        for line in lines
        if line.values and (known := dict(zip(line.positions, line.values, strict=True)))
    ]
    note = "Parts are means over the ranks. Where the teacher answers ahead, it computes beside the other parts."
    highest = None
    first, rest = totals[0].values[0], [value for line in totals for value in line.values[1:] if value]
    if first and rest and first > SPIKE * max(rest):
        highest = 1.2 * max(
            *rest, *(sum(part.values[place] or 0.0 for part in parts) for place in range(1, len(steps)))
        )
        note += f" The first logged update took {shown(float(first))} ms, which is beyond the axis."
    yield Chart("Time of an update", UPDATE, "ms", (*parts, *totals), "areas", note, highest=highest)
    extremes = []
    for metric, name in TIME_PARTS:
        fastest, slowest = line_of(run, f"{metric}_min"), line_of(run, f"{metric}_max")
        if slowest.values and slowest.values != fastest.values:
            extremes += [Line(f"{name}, slowest rank", *run.series(f"{metric}_max"))]
            extremes += [Line(f"{name}, fastest rank", *run.series(f"{metric}_min"))]
    if extremes:
        about = "A rank that is slow in one part is waited for in another: the others' student or teacher takes longer."
        yield Chart("Time of an update by rank", UPDATE, "ms", tuple(extremes), note=about, from_zero=True)


def overlaid(
    runs: Sequence[RunFiles], metric: str, title: str, unit: str, *, may_be_logarithmic: bool = False
) -> Chart | None:
    """One metric of all runs that have it; None where none has."""
    lines = tuple(line_of(run, metric, run.name) for run in runs if run.last(metric) is not None)
    if not lines:
        return None
    return Chart(
        title,
        UPDATE,
        unit,
        lines,
        may_be_logarithmic=may_be_logarithmic,
        from_zero=metric.startswith(FROM_ZERO),
        names_runs=True,
    )


def overlaid_charts(runs: Sequence[RunFiles]) -> Iterator[Chart]:
    """The curves of several runs laid over each other."""
    held_out = dict.fromkeys(name for run in runs for name in run.metric_names() if name.startswith("eval/"))
    titles = (
        ("loss", "Training loss", "loss"),
        *((name, f"Held-out: {name.removeprefix('eval/')}", name.removeprefix("eval/")) for name in held_out),
        ("lr", *NAMED["lr"]),
        ("grad_norm", *NAMED["grad_norm"]),
        ("perf/samples_per_s", *NAMED["perf/samples_per_s"]),
        ("memory/gpu_peak_gib", "Peak of GPU memory, fullest rank", "GiB"),
        ("memory/host_peak_gib", "Peak of host memory, largest process", "GiB"),
    )
    for metric, title, unit in titles:
        is_logarithmic = metric.startswith(LOGARITHMIC)
        if (chart := overlaid(runs, metric, title, unit, may_be_logarithmic=is_logarithmic)) is not None:
            yield chart
    names = [run.name for run in runs]
    parts = tuple(Line(name, names, [run.settled(metric) for run in runs]) for metric, name in TIME_PARTS)
    note = "Medians over the logged updates but the first; means over the ranks."
    yield Chart("Time of an update by its parts", "run", "ms", parts, "stacked bars", note)
