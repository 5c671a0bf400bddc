"""The page: one HTML document that loads nothing, with its script, style, figures and pictures inside."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import final

from plotly.offline import get_plotlyjs

from distiller import __version__
from distiller.report.charts import Chart, describe, figure_json, numbers_of
from distiller.report.comparison import comparison_tables
from distiller.report.facts import bad_batch_rows, run_facts, session_facts, session_rows, warnings_of
from distiller.report.markup import Markup, element, facts, folded, heading, join, table
from distiller.report.memory import memory_charts, predictions
from distiller.report.numbers import shown, thinned
from distiller.report.quality import band_charts, course_charts, named_reports, side_rows
from distiller.report.run_files import RunFiles
from distiller.report.training_charts import loss_charts, other_charts, overlaid_charts, time_charts

MAX_SAMPLES = 8
"""Evaluations whose samples are shown, beside the trained student's."""
MAX_PICTURE_BYTES = 20 * 2**20
MAX_TEXT_CHARACTERS = 200_000
MAX_BAD_BATCHES = 50
MIME_TYPES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif"}
_FOLDER = Path(__file__).parent


def make_page(runs: Sequence[RunFiles]) -> str:
    """The report of one run, or the comparison of several with the report of each, as HTML."""
    return _Page().make(runs)


@final
class _Page:
    """Numbers the figures and the headings that the contents link to."""

    def __init__(self) -> None:
        self._figures: list[Markup] = []
        self._contents: list[tuple[str, str]] = []
        self._numbers = count(1)

    def make(self, runs: Sequence[RunFiles]) -> str:
        """The whole document."""
        if len(runs) == 1:
            title, level, body = f"Distillation report: {runs[0].name}", 2, join(*self._run(runs[0], 2))
        else:
            title, level = f"Distillation report: {len(runs)} runs", 3
            parts = [self._section("Comparison", 2, *self._comparison(runs))]
            for run in runs:
                head = self._heading(run.name, 2)
                parts.append(join(head, *self._run(run, level)))
            body = join(*parts)
        scripts = [Markup(get_plotlyjs()), Markup((_FOLDER / "page.js").read_text(encoding="utf-8"))]
        # Only these two scripts run, and nothing is loaded from anywhere, whatever the run's files hold.
        hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
        policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}"
        links = (element("li", element("a", text, href=f"#{target}")) for target, text in self._contents)
        document = element(
            "html",
            element(
                "head",
                element("meta", charset="utf-8"),
                element("meta", http_equiv="Content-Security-Policy", content=policy),
                element("meta", name="viewport", content="width=device-width, initial-scale=1"),
                element("title", title),
                element("style", Markup((_FOLDER / "page.css").read_text(encoding="utf-8"))),
            ),
            element(
                "body",
                element("a", "Skip to the content", class_="skip", href="#content"),
                element("header", heading(1, title), element("nav", element("ul", *links), aria_label="Contents")),
                element("noscript", element("p", "Charts need JavaScript; their numbers stand in tables below each.")),
                element("main", body, id="content", tabindex="-1"),
                element("footer", element("p", f"Made by distiller {__version__}. {_HINT}", class_="muted")),
                *self._figures,
                *(element("script", script) for script in scripts),
            ),
            lang="en",
        )
        return f"<!DOCTYPE html>\n{document}\n"

    def _comparison(self, runs: Sequence[RunFiles]) -> Iterator[Markup]:
        yield from comparison_tables(runs)
        yield self._charts(overlaid_charts(runs), 3)
        newest = [(run.name, found[-1][1]) for run in runs if (found := run.reports())]
        yield self._charts(band_charts(newest), 3)

    def _run(self, run: RunFiles, level: int) -> Iterator[Markup]:
        """The sections of one run; the contents name them where the page is about this run alone."""
        yield self._section("What was distilled", level, facts(run_facts(run)))
        yield self._section("Warnings and skipped updates", level, *_warnings(run))
        others = list(other_charts(run))
        rates = [chart for name, chart in others if not name.startswith("perf/")]
        speeds = [chart for name, chart in others if name.startswith("perf/")]
        yield self._section("Loss and learning rate", level, self._charts((*loss_charts(run), *rates), level + 1))
        yield self._section("Time", level, self._charts((*time_charts(run), *speeds), level + 1))
        yield self._section("Memory", level, self._charts(memory_charts(run), level + 1))
        yield self._section("Predicted and measured", level, _predictions(run))
        yield self._section("Quality", level, *self._quality(run, level))
        yield self._section("Samples", level, *_samples(run))
        yield self._section("Where it ran", level, *_sessions(run))
        recipe = folded("recipe.yaml, with every default written out", element("pre", run.recipe_text))
        yield self._section("Recipe", level, recipe)

    def _quality(self, run: RunFiles, level: int) -> Iterator[Markup]:
        reports = run.reports()
        if not reports:
            yield element(
                "p",
                "No evaluation yet; ",
                element("code", "distiller evaluate"),
                " makes one of a run or a checkpoint.",
            )
            return
        step, newest = reports[-1]
        both, others = side_rows(newest)
        if both:
            yield table(f"Student and teacher, update {step:,}", ("figure", "student", "teacher"), both)
        if others:
            yield table(f"Further figures, update {step:,}", ("figure", "value"), others)
        yield self._charts((*band_charts(named_reports(run)), *course_charts(run)), level + 1)

    def _section(self, title: str, level: int, *content: Markup) -> Markup:
        return element("section", self._heading(title, level), *content)

    def _heading(self, text: str, level: int) -> Markup:
        name = f"section-{next(self._numbers)}"
        if level == 2:
            self._contents.append((name, text))
        return heading(level, text, id=name)

    def _charts(self, charts: Iterable[Chart], level: int) -> Markup:
        drawn = [self._chart(chart, level) for chart in charts]
        return element("div", *drawn, class_="charts") if drawn else Markup("")

    def _chart(self, chart: Chart, level: int) -> Markup:
        name = f"figure-{len(self._figures) + 1}"
        self._figures.append(element("script", Markup(figure_json(chart)), type="application/json", id=name))
        height = f"min-height:{chart.height}px"
        parts = [
            heading(level, chart.title),
            element("div", class_="plot", role="img", aria_label=describe(chart), data_figure=name, style=height),
        ]
        if chart.note:
            parts.append(element("p", chart.note, class_="muted"))
        head, rows = numbers_of(chart)
        parts.append(folded(f"Numbers: {chart.title}", table(f"{chart.title}, {chart.y}", head, rows)))
        return element("figure", *parts)


_HINT = "In a chart, drag with the mouse to zoom and double-click to go back; a click in a legend hides a line."


def _warnings(run: RunFiles) -> Iterator[Markup]:
    found = warnings_of(run)
    if not found:
        yield element("p", "None: no update was skipped, and every file of the run could be read.")
    else:
        yield element("ul", *(element("li", text) for text in found), class_="warnings")
    if rows := bad_batch_rows(run):
        kept = [rows[place] for place in thinned(len(rows), MAX_BAD_BATCHES)]
        head = ("update", "rank", "loss", "samples")
        yield table(f"Skipped updates ({len(kept)} of {len(rows)} lines of bad_batches.jsonl)", head, kept)


def _predictions(run: RunFiles) -> Markup:
    found = predictions(run)
    if not found:
        return element(
            "p", "No prediction: it is in the summary of a run that has ended on a GPU, for most placements."
        )
    rows = []
    for prediction in found:
        name, unit, expected, measured = prediction
        difference = prediction.difference
        verdict = "" if difference is None else f"{difference:+.1%}, {'off' if prediction.is_off else 'close'}"
        rows.append([f"{name}, {unit}", shown(expected), shown(measured), verdict])
    return table(
        "How far predictions lie from measurements; off: by more than a tenth",
        ("what", "predicted", "measured", "difference"),
        rows,
    )


def _samples(run: RunFiles) -> Iterator[Markup]:
    """The trained student's, and folded in those of evaluations during training."""
    final = [file for step, file in run.samples if step is None]
    steps = [(step, file) for step, file in run.samples if step is not None]
    if not run.samples:
        yield element("p", "None yet; a run draws or writes them at its end.")
    for file in final:
        yield _sample(file, "the trained student")
    for place in reversed(thinned(len(steps), MAX_SAMPLES)):
        step, file = steps[place]
        is_open = not final and place == len(steps) - 1
        sample = _sample(file, f"the student after update {step:,}")
        yield folded(f"Samples after update {step:,}", sample, is_open=is_open)


def _sample(file: Path, of: str) -> Markup:
    try:
        size = file.stat().st_size
        if file.suffix == ".txt":
            with file.open(encoding="utf-8", errors="replace") as stream:
                text = stream.read(MAX_TEXT_CHARACTERS + 1)
            if len(text) > MAX_TEXT_CHARACTERS:
                text = f"{text[:MAX_TEXT_CHARACTERS]}\n... the rest is in {file}"
            return element("pre", text, tabindex="0", role="region", aria_label=f"Texts of teacher and {of}")
        if size > MAX_PICTURE_BYTES:
            return element("p", f"{file} has {size / 2**20:.0f} MiB and is not shown here.")
        content = base64.b64encode(file.read_bytes()).decode()
    except OSError as error:
        return element("p", f"{file} cannot be read ({error.strerror}).")
    text = f"Samples of the teacher and of {of}, side by side with their titles"
    source = f"data:image/{MIME_TYPES[file.suffix]};base64,{content}"
    picture = element("img", src=source, alt=text, class_="picture")
    return element("div", picture, class_="scroll", tabindex="0", role="region", aria_label=f"Samples of {of}")


def _sessions(run: RunFiles) -> Iterator[Markup]:
    if not run.sessions:
        yield element("p", "Not recorded: the run has no environment.json.")
        return
    yield facts(session_facts(run.session))
    if len(run.sessions) > 1:
        head = ("started", "first update", "host", "GPUs", "processes", "engine", "commit")
        yield table(f"All {len(run.sessions)} sessions", head, session_rows(run.sessions))


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
