"""What evaluations say: figures of the student beside the teacher's, by bands such as noise levels, and by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distiller.report.charts import Chart, Line
from distiller.report.numbers import is_number, shown, thinned
from distiller.report.run_files import RunFiles

SIDES = ("student", "teacher")
MAX_REPORTS = 5
"""Evaluations whose bands stand in one chart."""

Reports = Sequence[tuple[str, Mapping[str, Any]]]
"""Evaluations under the names of their lines: steps of a run, or runs."""


def named_reports(run: RunFiles) -> Reports:
    """A run's evaluations by their steps, at most `MAX_REPORTS`, the first and the newest among them."""
    found = run.reports()
    return [(f"update {found[i][0]:,}", found[i][1]) for i in thinned(len(found), MAX_REPORTS)]


def scalars(report: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that are single values."""
    return {name: value for name, value in report.items() if is_number(value) or isinstance(value, str | bool)}


def band_figures(report: Mapping[str, Any], prefix: str = "") -> dict[str, dict[str, float]]:
    """Title -> band -> value, of every mapping of a report: of numbers, or of mappings of numbers, at any depth."""
    found: dict[str, dict[str, float]] = {}
    for name, value in report.items():
        if not isinstance(value, Mapping):
            continue
        title = f"{prefix}{name}".replace("_", " ")
        if numbers := {str(band): number for band, number in value.items() if is_number(number)}:
            found[title] = numbers
        tables = {str(band): table for band, table in value.items() if isinstance(table, Mapping)}
        for figure in dict.fromkeys(figure for table in tables.values() for figure in table):
            numbers = {band: table[figure] for band, table in tables.items() if is_number(table.get(figure))}
            if numbers:
                found[f"{title}: {figure}"] = numbers
        for band, table in tables.items():
            found |= band_figures(table, f"{prefix}{name}, {band}, ")
    return found


def split_side(name: str) -> tuple[str, str | None]:
    """A figure's name without its model, and the model: ("accuracy", "student") of "student_accuracy"."""
    head, _, figure = name.rpartition(": ")
    for side in SIDES:
        if figure.startswith(f"{side}_"):
            base = figure.removeprefix(f"{side}_")
            return (f"{head}: {base}" if head else base), side
    return name, None


def band_charts(reports: Reports) -> Iterator[Chart]:
    """Bars over the bands, one chart a figure; student and teacher, and all reports, stand in it side by side."""
    charts: dict[str, list[Line]] = {}
    for report_name, report in reports:
        for name, numbers in band_figures(report).items():
            title, side = split_side(name)
            words = [side] if side else []
            words += [report_name] if len(reports) > 1 or not side else []
            line = Line(", ".join(words), list(numbers), list(numbers.values()))
            charts.setdefault(title, []).append(line)
    for title, lines in charts.items():
        yield Chart(title, "band", title.rpartition(": ")[2], tuple(lines), "bars")


def course_charts(run: RunFiles) -> Iterator[Chart]:
    """Figures that changed from evaluation to evaluation, by the student's update."""
    reports = run.reports()
    charts: dict[str, list[Line]] = {}
    for name in dict.fromkeys(name for _, report in reports for name in scalars(report)):
        pairs = [(step, report[name]) for step, report in reports if is_number(report.get(name))]
        title, side = split_side(name)
        line = Line(side or "value", [step for step, _ in pairs], [value for _, value in pairs])
        charts.setdefault(title, []).append(line)
    for title, lines in charts.items():
        if any(len(set(line.values)) > 1 for line in lines):
            words = title.replace("_", " ")
            yield Chart(words, "update of the student", words, tuple(lines), may_be_logarithmic=True)


def side_rows(report: Mapping[str, Any]) -> tuple[list[list[str]], list[list[str]]]:
    """Rows (figure, student, teacher) of the figures that both have, and rows (figure, value) of the others."""
    sides: dict[str, dict[str, Any]] = {}
    for name, value in scalars(report).items():
        title, side = split_side(name)
        sides.setdefault(title, {})[side or ""] = value
    both = [
        [title.replace("_", " "), *(shown(found[side]) for side in SIDES)]
        for title, found in sides.items()
        if all(side in found for side in SIDES)
    ]
    others = [
        [f"{side} {title}".strip().replace("_", " "), shown(value)]
        for title, found in sides.items()
        for side, value in found.items()
        if not all(side in found for side in SIDES) or not side
    ]
    return both, others
