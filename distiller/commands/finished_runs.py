"""`distiller evaluate`, `sample` and `export`: what is done with a run that training has left."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from distiller.build import build_task
from distiller.commands.gates import Gate, check_keys, figures_of
from distiller.commands.harness import Harness
from distiller.commands.run_reading import exported_student, open_run, run_folder_of
from distiller.distributed.devices import best_device, teacher_dtype
from distiller.errors import QualityGateError, RunError, UserError
from distiller.export import export_checkpoint, find_checkpoint
from distiller.report.writing import REPORT_FILE, update_report
from distiller.run_folder.output_dir import SUMMARY_FILE
from distiller.storage.durable_writes import write_durably
from distiller.tasks.cost_figures import describe_cost
from distiller.tasks.interfaces import Evaluable, Samplable


def evaluate(
    given: Path,
    overrides: list[str],
    gates: Sequence[Gate] = (),
    harness_tasks: str | None = None,
    harness_folder: Path | None = None,
) -> None:
    """Compares student and teacher, prints a table and stores the figures.

    Of a finished run they go into summary.json, of a checkpoint into evaluation-step-N.json. A report.html that is
    there is written anew.

    Args:
        given: the run's folder or a checkpoint of it.
        overrides: keys of the recipe that are given anew.
        gates: bounds on the figures.
        harness_tasks: tasks of lm-evaluation-harness, between commas, whose results come under `lm_eval`.
        harness_folder: further task files of the harness.

    Raises:
        UserError: a gate is on a figure that the report has not; the harness has no such task.
        RunError: the harness failed; the other figures are printed and stored all the same.
        QualityGateError: a gate, or one of the recipe's, is missed; the figures are printed and stored all the same.
    """
    run, device = open_run(given, "evaluate", overrides), best_device()
    task = build_task(run.recipe)
    if not isinstance(task, Evaluable):
        raise UserError(f"distiller evaluate: task.kind {run.recipe.task.kind} has no evaluation")
    harness = None
    if harness_tasks is not None:
        harness = Harness.open(run.recipe.task.kind, harness_tasks, harness_folder)
    check_keys(gates, task.figures(), () if harness is None else ("lm_eval.",))
    summary = _summary(run.folder)
    with exported_student(run, task) as (folder, step):
        report = task.evaluate(folder, teacher_dtype(run.recipe.teacher.dtype, device), device)
        failure = None
        if harness is not None:
            try:
                report["lm_eval"] = harness.run(folder / "student", device, run.recipe.task.trust_remote_code)
            except Exception as error:
                # The harness downloads data sets, and the figures so far may have taken hours.
                failure = error
    # Before they are stored: hours of work must not be lost with a disk.
    rows = _flat_rows(report)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}} {value}")
    print(describe_cost(report))
    try:
        _store(run.folder, report, step, summary)
    except OSError as error:
        raise RunError(f"{run.folder}: the figures above cannot be stored ({error.strerror or error})") from error
    if (run.folder / REPORT_FILE).is_file():
        update_report(run.folder)
    if failure is not None:
        reason = f"{type(failure).__name__}: {failure}"
        raise RunError(f"lm-evaluation-harness failed, the figures above have none of it ({reason})") from failure
    figures = figures_of(report)
    misses = [task.missed_gate(report), *(gate.describe_miss(figures) for gate in gates)]
    if missed := "; ".join(miss for miss in misses if miss is not None):
        raise QualityGateError(missed)


def sample(given: Path, overrides: list[str], prompts: list[str], seed: int, output: Path | None) -> None:
    """Writes teacher and student side by side for these prompts, into a new file of the run's folder by default."""
    run = open_run(given, "sample", overrides)
    task = build_task(run.recipe)
    if not isinstance(task, Samplable):
        raise UserError(f"distiller sample: task.kind {run.recipe.task.kind} shows no samples")
    target = output or _free_file(run.folder / f"samples{task.sample_suffixes[0]}")
    if target.suffix.lower() not in task.sample_suffixes or not os.path.isdir(target.parent):
        suffixes = ", ".join(sorted(task.sample_suffixes))
        raise UserError(f"--output {target}: give a file in a folder that exists, ending in one of {suffixes}")
    if not os.access(target.parent, os.W_OK):
        raise UserError(f"{target.parent}: cannot be written; give --output with a file in another folder")
    with exported_student(run, task) as (folder, _):
        task.sample(folder, prompts, seed, best_device(), target)
    print(target)


def export(checkpoint: Path, output: Path | None) -> None:
    """Writes the student of a checkpoint, by its run's recipe."""
    folder = Path(os.path.abspath(find_checkpoint(checkpoint)))
    run_dir = run_folder_of(folder)
    target = output or run_dir / f"student-{folder.name}"
    if os.path.lexists(target):
        raise UserError(f"--output {target}: is already there; give a folder that is not")
    if not os.path.isdir(target.parent):
        raise UserError(f"--output {target}: {target.parent} is not a folder")
    export_checkpoint(build_task(open_run(run_dir, "export").recipe), folder, target)
    print(target)


def _summary(folder: Path) -> dict[str, Any]:
    """The content of summary.json, empty where there is none. Raises UserError."""
    file = folder / SUMMARY_FILE
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise UserError(f"{file}: is not readable JSON ({error}); remove it") from error


def _store(folder: Path, report: dict[str, Any], step: int | None, summary: dict[str, Any]) -> None:
    """Writes the figures; `summary` is what was in summary.json before the evaluation."""
    if step is not None:
        write_durably(folder / f"evaluation-step-{step}.json", json.dumps(report, indent=2) + "\n")
    elif (current := _summary(folder)).get("steps") != summary.get("steps"):
        print(f"note: {folder} was trained on meanwhile; the figures are of its former student and are not stored")
    else:
        write_durably(folder / SUMMARY_FILE, json.dumps(current | {"evaluation": report}, indent=2) + "\n")


def _free_file(file: Path) -> Path:
    """`samples-1.png` and so on, the first that is not there: `samples.png` is what training drew."""
    numbered = (file.with_name(f"{file.stem}-{number}{file.suffix}") for number in count(1))
    return next(free for free in numbered if not os.path.lexists(free))


def _flat_rows(report: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The figures under the dotted names by which `--min` and `--max` take them."""
    rows = []
    for name, value in report.items():
        if value is None:
            continue
        if isinstance(value, dict):
            rows += _flat_rows(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", f"{value:.4g}" if isinstance(value, float) else f"{value}"))
    return rows
