"""Reads what a run has left in its folder, whether it is finished, still running, or was cut short."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

from distiller.errors import UserError
from distiller.report.numbers import is_number, median_of
from distiller.run_folder.environment import Session, read_sessions
from distiller.run_folder.files import BAD_BATCHES_FILE, ENVIRONMENT_FILE, METRICS_FILE, RECIPE_FILE, SUMMARY_FILE
from distiller.storage.yaml_files import parse_yaml

SAMPLE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".txt")


@final
@dataclass(frozen=True)
class RunFiles:
    """A run as its folder tells it.

    Attributes:
        name: by which the page tells runs apart.
        recipe: the resolved recipe.
        lines: of metrics.jsonl, whose steps increase.
        summary: empty until the run has ended.
        evaluations: step -> report, of evaluation-step-N.json.
        sessions: of environment.json, oldest first.
        bad_batches: of bad_batches.jsonl.
        samples: (step, file), oldest first; None for those of the trained student.
        damaged: names of files that are there and cannot be read.
    """

    name: str
    folder: Path
    recipe: Mapping[str, Any]
    recipe_text: str
    lines: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]
    evaluations: Mapping[int, Mapping[str, Any]]
    sessions: tuple[Session, ...]
    bad_batches: tuple[Mapping[str, Any], ...]
    samples: tuple[tuple[int | None, Path], ...]
    damaged: tuple[str, ...]

    @property
    def last_step(self) -> int:
        """The newest step that was logged."""
        return self.lines[-1]["step"]

    @property
    def planned_steps(self) -> int | None:
        """Where the run ends; None where only its data say so, and it has not ended."""
        return self.setting("train.max_steps") or self.summary.get("steps")

    @property
    def is_finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.summary.get("steps") == self.last_step == self.planned_steps

    @property
    def session(self) -> Session:
        """The newest session; empty where none was recorded."""
        return self.sessions[-1] if self.sessions else {}

    def setting(self, key: str) -> Any:
        """The value of a recipe's dotted key; None where it has none."""
        value: Any = self.recipe
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, where it has one."""
        return self._columns.get(name, ([], []))

    def last(self, name: str) -> float | None:
        """The newest value of a metric."""
        _, values = self.series(name)
        return values[-1] if values else None

    def settled(self, name: str) -> float | None:
        """The median of a metric without its first value, which holds what happens once."""
        _, values = self.series(name)
        return median_of(values[1:] or values)

    def metric_names(self) -> list[str]:
        """Metrics with at least one number, in the order of the file."""
        return list(self._columns)

    @cached_property
    def _columns(self) -> dict[str, tuple[list[int], list[float]]]:
        """Metric -> its steps and values; read once, since a long run has a hundred thousand lines."""
        columns: dict[str, tuple[list[int], list[float]]] = {}
        for line in self.lines:
            for name, value in line.items():
                if is_number(value):
                    steps, values = columns.setdefault(name, ([], []))
                    steps.append(line["step"])
                    values.append(value)
        return columns

    def reports(self) -> list[tuple[int, Mapping[str, Any]]]:
        """Evaluations with the step of their student, oldest first; the trained student's is the last."""
        found = dict(self.evaluations)
        if self.summary.get("evaluation"):
            found[self.summary.get("steps") or self.last_step] = self.summary["evaluation"]
        return sorted(found.items())


def read_run(folder: Path) -> RunFiles:
    """Reads a run's folder. Raises UserError where it is none, or has logged nothing yet."""
    if not os.path.isfile(folder / RECIPE_FILE):
        raise UserError(f"{folder}: is not a run's output folder (it has no {RECIPE_FILE})")
    damaged: list[str] = []
    try:
        text = (folder / RECIPE_FILE).read_text(encoding="utf-8")
        recipe = parse_yaml(text)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / RECIPE_FILE} cannot be read ({error})") from error
    if not isinstance(recipe, dict):
        raise UserError(f"{folder / RECIPE_FILE} is not a recipe")
    try:
        lines = tuple(_increasing(_json_lines(folder / METRICS_FILE)))
    except FileNotFoundError as error:
        raise UserError(f"{folder}: has no {METRICS_FILE} yet; it appears with the first logged update") from error
    except OSError as error:
        raise UserError(f"{folder / METRICS_FILE} cannot be read ({error.strerror})") from error
    if not lines:
        raise UserError(f"{folder / METRICS_FILE}: has no complete line yet; wait for the first logged update")
    evaluations = {}
    for file in folder.glob("evaluation-step-*.json"):
        if (match := re.fullmatch(r"evaluation-step-(\d+)\.json", file.name)) is not None:
            evaluations[int(match[1])] = _json_object(file, damaged)
    summary = _json_object(folder / SUMMARY_FILE, damaged)
    if not isinstance(summary.get("evaluation", {}), dict):
        damaged.append(SUMMARY_FILE)
        summary = {}
    sessions = tuple(read_sessions(folder))
    if not sessions and (folder / ENVIRONMENT_FILE).exists():
        damaged.append(ENVIRONMENT_FILE)
    try:
        bad_batches = tuple(_json_lines(folder / BAD_BATCHES_FILE))
    except OSError:
        bad_batches = ()
    name = folder.resolve().name or str(folder)
    return RunFiles(
        name,
        folder,
        recipe,
        text,
        lines,
        summary,
        {step: report for step, report in sorted(evaluations.items()) if report},
        sessions,
        bad_batches,
        tuple(_samples(folder)),
        tuple(damaged),
    )


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file's lines; torn lines are left out. Raises OSError."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict):
            yield content


def _increasing(lines: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines with a step; where a step comes again, what was logged from it on before is dropped."""
    kept: list[dict[str, Any]] = []
    for line in lines:
        if not isinstance(line.get("step"), int):
            continue
        while kept and kept[-1]["step"] >= line["step"]:
            kept.pop()
        kept.append(line)
    return kept


def _json_object(file: Path, damaged: list[str]) -> dict[str, Any]:
    """A file's object; empty where there is none. A damaged file's name is added to `damaged`."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        damaged.append(file.name)
        return {}
    return content


def _samples(folder: Path) -> Iterator[tuple[int | None, Path]]:
    steps = {
        int(match[1]): path
        for path in folder.glob("evaluations/step-*")
        if (match := re.fullmatch(r"step-(\d+)", path.name)) is not None
    }
    for step, path in (*sorted(steps.items()), (None, folder)):
        for suffix in SAMPLE_SUFFIXES:
            if (file := path / f"samples{suffix}").is_file():
                yield step, file
