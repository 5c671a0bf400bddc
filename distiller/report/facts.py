"""What was distilled, where it ran, and what a reader must know before the figures are trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from distiller.config.sections import flatten
from distiller.report.memory import card_gib, predictions
from distiller.report.numbers import duration, is_number, shown
from distiller.report.run_files import RunFiles
from distiller.run_folder.environment import Session

FULL = 0.95
"""Share of a GPU's memory from which its use is a warning."""
MAX_IDS = 16

Rows = list[tuple[str, str]]


def state_of(run: RunFiles) -> str:
    """Finished or not, in words."""
    if run.is_finished:
        return f"finished after {run.last_step:,} updates"
    of = f" of {run.planned_steps:,}" if run.planned_steps else ""
    return f"unfinished: the newest logged update is {run.last_step:,}{of}"


def run_facts(run: RunFiles) -> Rows:
    """Teacher, student, data, and how the run went."""
    summary, session = run.summary, run.session
    known = {**session, **summary}
    teacher, student = known.get("teacher_params"), known.get("student_params")
    share = (
        f" ({student / teacher:.1%} of the teacher's)" if is_number(teacher) and is_number(student) and teacher else ""
    )
    engine, world = known.get("engine"), known.get("world_size")
    seconds, samples = summary.get("wall_s"), run.last("samples")
    rows = (
        ("State", state_of(run)),
        ("Task", run.setting("task.kind") or "diffusion"),
        ("Teacher", _joined(run.setting("teacher.path"), _count(teacher, "parameters"))),
        ("Teacher's place", _joined(known.get("placement") or run.setting("teacher.placement"), _quantization(run))),
        ("Student", _joined(_student(run), _count(student, f"parameters{share}"))),
        ("Data", _joined(run.setting("data.kind"), run.setting("data.path"))),
        ("Engine", _joined(engine, _processes(world), _precision(run))),
        ("GPUs", gpus_of(session)),
        ("Samples seen", None if samples is None else shown(int(samples))),
        ("Final loss" if run.is_finished else "Newest loss", _known(run.last("loss"))),
        ("Held-out loss", _held_out(run)),
        ("Time of an update, median", _with_unit(run.settled("perf/step_ms"), "ms")),
        ("Throughput", _with_unit(throughput(run), "samples/s")),
        ("Took", duration(seconds) if is_number(seconds) else None),
        ("Sessions", _known(summary.get("sessions") or len(run.sessions) or None)),
        ("Folder", str(run.folder.resolve())),
    )
    return [(name, value) for name, value in rows if value]


def throughput(run: RunFiles) -> float | None:
    """Samples a second: over the whole run where it has ended, else the median of what was logged."""
    whole = run.summary.get("samples_per_s")
    return whole if is_number(whole) else run.settled("perf/samples_per_s")


def gpus_of(session: Session) -> str:
    """The session's GPUs, those of one kind together."""
    gpus = [gpu for gpu in session.get("gpus") or [] if isinstance(gpu, Mapping)]
    kinds = groupby(gpus, key=lambda gpu: (gpu.get("name"), gpu.get("memory_gib")))
    parts = [(len(list(group)), name, size) for (name, size), group in kinds]
    return ", ".join(f"{count} x {name} ({shown(size)} GiB)" for count, name, size in parts)


def session_facts(session: Session) -> Rows:
    """One session's machine, software and command line."""
    cpu, git, versions = (_mapping(session.get(name)) for name in ("cpu", "git", "versions"))
    state = {True: ", with changes that are not committed", False: ", without changes"}.get(git.get("is_dirty"), "")  # type: ignore[arg-type]
    command = session.get("command") or []
    rows = (
        ("Started", _time(session.get("started"))),
        ("First update", _known(session.get("first_step"))),
        ("Host", session.get("host")),
        ("GPUs", gpus_of(session) or "none used"),
        ("CPU", _joined(cpu.get("model"), _count(cpu.get("cores"), "cores"))),
        ("Host memory", _with_unit(session.get("host_memory_gib"), "GiB")),
        ("Engine", _joined(session.get("engine"), _processes(session.get("world_size")))),
        ("Versions", ", ".join(f"{name} {value}" for name, value in versions.items() if value)),
        ("Git commit of the working folder", f"{git['commit']}{state}" if git.get("commit") else None),
        ("Command", " ".join(map(str, command)) if isinstance(command, list) else None),
    )
    return [(name, str(value)) for name, value in rows if value]


def session_rows(sessions: Sequence[Session]) -> list[list[str]]:
    """A row for each session: start, first update, host, GPUs, processes, engine, commit."""
    return [
        [
            _time(session.get("started")),
            shown(session.get("first_step")),
            str(session.get("host")),
            gpus_of(session) or "none used",
            shown(session.get("world_size")),
            str(session.get("engine")),
            str(_mapping(session.get("git")).get("commit") or shown(None))[:12],
        ]
        for session in sessions
    ]


def warnings_of(run: RunFiles) -> list[str]:
    """A sentence for everything that a reader must know."""
    found = []
    if not run.is_finished:
        found.append(f"The run is {state_of(run)}.")
    if skipped := run.last("optim/skipped_steps"):
        where = "; their batches are below" if run.bad_batches else ""
        found.append(f"{int(skipped):,} of {run.last_step:,} updates were skipped: loss or gradient not finite{where}.")
    if failed := run.summary.get("failed_saves"):
        found.append(f"{failed} checkpoints could not be written.")
    if missing := sum(line.get("loss", 0) is None for line in run.lines):
        found.append(f"{missing} of {len(run.lines)} logged losses are not finite.")
    for name, unit, expected, measured in (prediction for prediction in predictions(run) if prediction.is_off):
        found.append(f"Predicted {name}: {shown(expected)} {unit}; measured: {shown(measured)} {unit}.")
    size, peak = card_gib(run), run.last("memory/gpu_peak_gib")
    if size and peak and peak > FULL * size:
        found.append(f"The fullest GPU held {shown(peak)} of {shown(size)} GiB: longer samples may not fit.")
    error = run.summary.get("teacher_quantization_error")
    if is_number(error):
        found.append(f"The teacher is quantised: its outputs differ by {error:.2%} (relative error).")
    found += [f"{name} is damaged and was left out." for name in dict.fromkeys(run.damaged)]
    return found


def bad_batch_rows(run: RunFiles) -> list[list[str]]:
    """A row for each rank's part of a bad update: update, rank, loss, samples."""
    rows = []
    for batch in run.bad_batches:
        ids = batch.get("sample_ids")
        ids = ids if isinstance(ids, list) else []
        more = f" and {len(ids) - MAX_IDS} more" if len(ids) > MAX_IDS else ""
        named = ", ".join(map(str, ids[:MAX_IDS])) + more
        rows.append([shown(batch.get("step")), shown(batch.get("rank")), shown(batch.get("loss")), named])
    return rows


def differing_settings(runs: Sequence[RunFiles]) -> list[list[str]]:
    """Rows (key, value in each run) of the recipes' keys that differ, `output_dir` left out."""
    flat = [flatten(run.recipe) for run in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings if key != "output_dir")
    rows = []
    for key in keys:
        values = [_setting(settings.get(key)) for settings in flat]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return rows


def _time(value: Any) -> str:
    return str(value).replace("T", " ").replace("+00:00", " UTC")


def _setting(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else shown(value)


def _held_out(run: RunFiles) -> str | None:
    """The newest and the lowest loss on held-out data."""
    steps, losses = run.series("eval/loss")
    if not losses:
        return None
    lowest = min(losses)
    return f"{shown(losses[-1])} at update {steps[-1]:,}; lowest {shown(lowest)} at {steps[losses.index(lowest)]:,}"


def _student(run: RunFiles) -> str | None:
    layers = run.setting("student.num_layers")
    return (
        run.setting("student.config") or run.setting("student.path") or (layers and f"{layers} of the teacher's layers")
    )


def _quantization(run: RunFiles) -> str | None:
    kind = run.setting("teacher.quantization")
    return None if kind in (None, "none") else f"quantised as {kind}"


def _precision(run: RunFiles) -> str | None:
    known = {**run.session, **run.summary}
    precision = known.get("mixed_precision") or run.setting("train.mixed_precision")
    return {"no": "float32", None: None}.get(precision, f"mixed precision {precision}")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _joined(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part)


def _processes(number: Any) -> str | None:
    return _count(number, "process" if number == 1 else "processes")


def _known(value: Any) -> str | None:
    return None if value is None else shown(value)


def _count(value: Any, unit: str) -> str | None:
    return f"{shown(value)} {unit}" if is_number(value) else None


def _with_unit(value: Any, unit: str) -> str | None:
    return f"{shown(value)} {unit}" if is_number(value) else None
