"""The report page: its figures are the run's numbers, it loads nothing, and no text of a file becomes markup."""

from __future__ import annotations

import base64
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import plotly.graph_objects as plotly
import pytest

from distiller import commands
from distiller.cli import main
from distiller.commands.training_run import update_report
from distiller.report.charts import COLOURS, MAX_ROWS, Chart, Line, describe, figure_json, numbers_of
from distiller.report.numbers import MAX_POINTS, extremes, thinned
from distiller.report.quality import band_figures, split_side
from distiller.report.run_files import read_run
from distiller.report.writing import report
from distiller.run_folder.environment import append_session, describe_session, git_state, read_sessions, without_secrets
from tests.browser import Browser, find_browser
from tests.toy_run_files import NOISE_LEVELS, STEPS, metrics_line, write_json, write_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"
LOADS = {"src", "href", "srcset", "data", "poster", "action", "background"}
"""Attributes by which a browser may load something."""


class Page(HTMLParser):
    """A page as a browser reads it: elements, their attributes and texts."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "img"):
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self._open):
            self.texts[tag][-1] += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def figures(self) -> dict[str, dict[str, Any]]:
        """Title -> the first figure of that title, as plotly reads it."""
        scripts = zip(self.all("script"), self.texts["script"], strict=True)
        content = {attributes["id"]: text for attributes, text in scripts if "id" in attributes}
        found: dict[str, dict[str, Any]] = {}
        for plot in self.all("div"):
            if "data-figure" in plot:
                found.setdefault(plot["aria-label"].split(":")[0], json.loads(content[plot["data-figure"]]))
        return found


def page_of(*folders: Path, output: Path | None = None) -> Page:
    return Page(report(folders, output))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "first")


def series(figure: dict[str, Any], name: str) -> tuple[list[int], list[float]]:
    (trace,) = (trace for trace in figure["data"] if trace["name"] == name)
    return trace["x"], trace["y"]


class TestOneRun:
    def test_the_figures_hold_what_metrics_jsonl_says(self, run_dir):
        lines, figures = [metrics_line(step) for step in STEPS], page_of(run_dir).figures()
        for title, name, metric in (
            ("Training loss", "loss", "loss"),
            ("Training loss", "loss/features", "loss/features"),
            ("Learning rate", "lr", "lr"),
            ("Time of an update", "teacher", "perf/teacher_ms"),
            ("Time of an update", "data", "perf/data_ms"),
            ("Time of an update", "slowest rank", "perf/step_ms_max"),
            ("Time of an update by rank", "data, slowest rank", "perf/data_ms_max"),
            ("Time of an update by rank", "data, fastest rank", "perf/data_ms_min"),
            ("Memory during training", "GPU peak, emptiest rank", "memory/gpu_peak_gib_min"),
            ("Memory during training", "teacher's answers ahead", "memory/prefetched_gib"),
            ("Skipped updates so far", "optim/skipped_steps", "optim/skipped_steps"),
        ):
            assert series(figures[title], name) == (list(STEPS), [line[metric] for line in lines]), metric
        assert series(figures["Held-out loss"], "eval/loss") == ([20, 40], [0.125, 0.0625])
        assert series(figures["Held-out loss"], "eval/loss/prediction") == ([20, 40], [0.1, 0.05])
        # Parts whose ranks do not differ have no lines of their own.
        assert len(figures["Time of an update by rank"]["data"]) == 2
        stacked = [trace["name"] for trace in figures["Time of an update"]["data"] if trace.get("stackgroup")]
        assert stacked == ["teacher", "student", "optimizer", "data"]

    def test_every_figure_is_one_that_plotly_accepts_with_named_axes(self, run_dir):
        for figure in page_of(run_dir).figures().values():
            plotly.Figure(figure)
            assert figure["layout"]["xaxis"]["title"]["text"]
            assert figure["layout"]["yaxis"]["title"]["text"]

    def test_memory_by_owner_against_the_card(self, run_dir):
        figure = page_of(run_dir).figures()["GPU memory by owner, at its peak"]
        owners = {trace["name"]: trace["y"] for trace in figure["data"]}
        assert owners["teacher's weights"][0] == 26.7
        assert sum(values[0] or 0 for values in owners.values()) == pytest.approx(70.0)
        assert owners["all owners"] == [None, 61.0]
        assert figure["layout"]["shapes"][0]["y0"] == 139.8

    def test_quality_is_drawn_by_band_for_student_and_teacher(self, run_dir):
        figure = page_of(run_dir).figures()["by noise level"]
        bars = {trace["name"]: trace for trace in figure["data"]}
        assert bars["student, update 40"]["y"] == [values["student_mse"] for values in NOISE_LEVELS.values()]
        assert bars["teacher, update 20"]["y"] == [values["teacher_mse"] for values in NOISE_LEVELS.values()]
        shapes = [trace["marker"]["pattern"]["shape"] for trace in figure["data"]]
        assert len(set(shapes)) == len(shapes)

    def test_the_page_says_what_happened(self, run_dir):
        page = page_of(run_dir)
        text = " ".join(page.texts["main"][0].split())
        for words in (
            "finished after 40 updates", "1,000,000 parameters (25.0% of the teacher's)", "2 x NVIDIA H200 (139.8 GiB)",
            "0.0625 at update 40; lowest 0.0625 at 40",
            "2 of 40 updates were skipped", "Predicted time of an update, median: 80 ms; measured: 100 ms", "node-2",
            "with changes that are not committed", "teacher: in the snow", "Samples after update 20", "-1.4%, close",
        ):  # fmt: skip
            assert words in text, words
        assert "Predicted peak" not in text
        pictures = [picture["src"] for picture in page.all("img")]
        content = base64.b64encode((run_dir / "samples.png").read_bytes()).decode()
        assert pictures[0] == f"data:image/png;base64,{content}"
        assert len(pictures) == 3

    def test_it_can_be_read_without_seeing_it(self, run_dir):
        page = page_of(run_dir)
        assert page.all("html") == [{"lang": "en"}]
        assert page.all("a")[0]["href"] == "#content"
        assert page.all("main")[0]["id"] == "content"
        levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
        assert levels[0] == 1
        assert all(later <= earlier + 1 for earlier, later in pairwise(levels))
        plots = [plot for plot in page.all("div") if "data-figure" in plot]
        assert len(plots) == len(page.all("figure"))
        assert all(plot["role"] == "img" for plot in plots)
        loss = next(plot["aria-label"] for plot in plots if plot["aria-label"].startswith("Training loss"))
        assert "loss: first 2 at 1, last 0.05 at 40, lowest 0.05 at 40, highest 2 at 1." in loss
        assert all(picture["alt"] for picture in page.all("img"))
        # A table beside every chart.
        captions = Counter(text.partition(",")[0] for text in page.texts["caption"])
        assert captions["Training loss"] == 1
        ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
        assert len(set(ids)) == len(ids)
        targets = [link["href"][1:] for link in page.all("a")]
        assert set(targets) <= set(ids)

    def test_nothing_is_loaded(self, run_dir):
        page = page_of(run_dir)
        for _, attributes in page.elements:
            for name in LOADS & attributes.keys():
                assert attributes[name].startswith(("#", "data:image/")), attributes
            assert "url(" not in attributes.get("style", "")
        assert not re.search(r"url\(|@import", page.texts["style"][0])
        (policy,) = (meta["content"] for meta in page.all("meta") if "http-equiv" in meta)
        assert policy.startswith("default-src 'none'; img-src data:;")
        assert sum("plotly.js v" in text for text in page.texts["script"]) == 1

    def test_text_of_files_stays_text(self, tmp_path):
        folder = write_run(tmp_path / "a<b>&c", data={"path": HOSTILE}, teacher={"path": HOSTILE})
        (folder / "samples.txt").write_text(HOSTILE)
        report_of_run = json.loads((folder / "summary.json").read_text())
        report_of_run["evaluation"] |= {HOSTILE: {HOSTILE: {HOSTILE: 1.0}}, "device": HOSTILE}
        write_json(folder / "summary.json", report_of_run)
        append_session(folder, {"command": [HOSTILE], "host": HOSTILE, "gpus": [{"name": HOSTILE, "memory_gib": 80}]})
        with (folder / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps(metrics_line(50) | {f"loss/{HOSTILE}": 1.0, HOSTILE: 2.0}) + "\n")
        plain = Page(report([write_run(tmp_path / "plain")], None))
        page = page_of(folder)
        assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
        # As many scripts as there are figures, and the two of the page.
        assert len(page.all("script")) == len(page.all("figure")) + 2
        assert len(page.all("img")) == len(plain.all("img"))
        assert HOSTILE in page.texts["pre"][0]
        assert page.texts["title"] == ["Distillation report: a<b>&c"]
        names = [trace["name"] for figure in page.figures().values() for trace in figure["data"]]
        assert not any("<" in name for name in names)

    def test_an_unfinished_run_with_a_torn_line(self, tmp_path):
        folder = write_run(tmp_path / "run", is_finished=False)
        with (folder / "metrics.jsonl").open("a") as stream:
            stream.write('{"step": 30, "loss": 0.0')
        page = page_of(folder)
        assert "unfinished: the newest logged update is 20 of 40" in page.texts["main"][0]
        assert series(page.figures()["Training loss"], "loss")[0] == [1, 10, 20]

    def test_an_unfinished_run_says_what_its_session_found(self, tmp_path):
        folder = write_run(tmp_path / "run", is_finished=False)
        file = folder / "environment.json"
        *earlier, newest = json.loads(file.read_text())
        newest |= {"placement": "streamed", "mixed_precision": "bf16", "student_params": 250, "teacher_params": 1000}
        file.write_text(json.dumps([*earlier, newest]))
        text = page_of(folder).texts["main"][0]
        assert all(words in text for words in ("streamed", "mixed precision bf16", "25.0% of the teacher's"))

    def test_a_run_that_goes_on_after_its_end_is_unfinished(self, run_dir):
        recipe = (run_dir / "recipe.yaml").read_text()
        (run_dir / "recipe.yaml").write_text(recipe.replace("max_steps: 40", "max_steps: 80"))
        assert not read_run(run_dir).is_finished

    def test_steps_never_go_back(self, run_dir):
        with (run_dir / "metrics.jsonl").open("a") as stream:
            stream.write("".join(json.dumps({"step": step, "loss": 9.0}) + "\n" for step in (20, 25)))
        assert read_run(run_dir).series("loss") == ([1, 10, 20, 25], [2.0, 0.2, 9.0, 9.0])

    def test_only_a_recipe_and_a_line_are_needed(self, tmp_path):
        (tmp_path / "recipe.yaml").write_text("seed: 1\n")
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n')
        text = page_of(tmp_path).texts["main"][0]
        assert "1 of 1 logged losses are not finite" in text
        assert "no environment.json" in text

    @pytest.mark.parametrize("name", ["summary.json", "environment.json", "evaluation-step-20.json"])
    def test_damaged_files_are_left_out_and_named(self, run_dir, name):
        (run_dir / name).write_text("[")
        assert f"{name} is damaged and was left out" in page_of(run_dir).texts["main"][0]

    def test_a_longer_first_update_does_not_flatten_the_others(self, run_dir):
        page = page_of(run_dir)
        assert page.figures()["Time of an update"]["layout"]["yaxis"]["range"] == [0, pytest.approx(1.2 * 105)]
        assert "The first logged update took 500 ms, which is beyond the axis." in page.texts["main"][0]


class TestSeveralRuns:
    def test_they_are_compared_first_and_laid_over_each_other(self, run_dir, tmp_path, monkeypatch):
        second = write_run(tmp_path / "second", rate=2e-3, is_finished=False, train={"batch_size": 4})
        monkeypatch.chdir(tmp_path)
        page = page_of(run_dir, second)
        assert (tmp_path / "report.html").is_file()
        assert page.texts["h2"] == ["Comparison", "first", "second"]
        assert page.texts["caption"][:2] == ["What differs in the recipes", "Results"]
        settings, results = page.texts["table"][:2]
        assert [text in settings for text in ("optim.lr0.0010.002", "train.batch_size84", "teacher.path")] == [
            True, True, False,
        ]  # fmt: skip
        for row in ("newest loss0.050.1", "updates/s1010", "peak of GPU memory, GiB7070", "student recognised0.90.7"):
            assert row in results, row
        loss = next(iter(page.figures().values()))
        assert [(trace["name"], trace["x"]) for trace in loss["data"]] == [
            ("first", list(STEPS)),
            ("second", list(STEPS[:3])),
        ]
        styles = [(trace["line"]["color"], trace["line"]["dash"]) for trace in loss["data"]]
        assert styles[0][0] != styles[1][0]
        assert styles[0][1] != styles[1][1]

    def test_equal_names_are_told_apart_by_their_folders(self, tmp_path):
        folders = [write_run(tmp_path / parent / "run") for parent in ("a", "b")]
        page = page_of(*folders, output=tmp_path / "both.html")
        assert page.texts["h2"] == ["Comparison", "a/run", "b/run"]
        assert "The recipes do not differ." in page.texts["main"][0]


class TestErrors:
    def refuse(self, capfd, *arguments: object) -> str:
        assert main(["report", *map(str, arguments)]) == 2
        out, err = capfd.readouterr()
        assert not out
        assert err.startswith("distiller: ")
        assert err.count("\n") == 1
        return err

    def test_no_run(self, tmp_path, capfd):
        assert "is not a run's output folder" in self.refuse(capfd, tmp_path)
        assert "is not a run's output folder" in self.refuse(capfd, tmp_path / "missing")
        (tmp_path / "recipe.yaml").write_text("a: [")
        assert "recipe.yaml cannot be read" in self.refuse(capfd, tmp_path)
        (tmp_path / "recipe.yaml").write_text("seed: 1\n")
        assert "has no metrics.jsonl yet" in self.refuse(capfd, tmp_path)
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')
        assert "has no complete line yet" in self.refuse(capfd, tmp_path)
        assert not (tmp_path / "report.html").exists()

    def test_no_place_for_the_page(self, run_dir, tmp_path, capfd, monkeypatch):
        assert "is a folder" in self.refuse(capfd, run_dir, "-o", tmp_path)
        assert "its folder does not exist" in self.refuse(capfd, run_dir, "-o", tmp_path / "no" / "page.html")
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        assert "cannot be written" in self.refuse(capfd, run_dir)
        assert "a run is given twice" in self.refuse(capfd, run_dir, run_dir)

    def test_a_full_disk_leaves_no_part_of_it(self, run_dir, capfd, monkeypatch):
        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        before = sorted(os.listdir(run_dir))
        assert "No space left on device" in self.refuse(capfd, run_dir)
        update_report(run_dir)
        _, err = capfd.readouterr()
        assert err.startswith("warning: ")
        assert "No space left on device" in err
        assert err.count("\n") == 1
        assert sorted(os.listdir(run_dir)) == before

    def test_it_starts_without_torch(self, run_dir):
        code = (
            "import sys; from distiller.cli import main; code = main(sys.argv[1:]); "
            "sys.exit(code or ('torch' in sys.modules) * 9)"
        )
        done = subprocess.run([sys.executable, "-c", code, "report", str(run_dir)], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, f"{run_dir / 'report.html'}\n"), done.stderr


class TestEnvironment:
    def test_every_session_adds_an_entry(self, tmp_path):
        for step in (1, 11):
            append_session(tmp_path, describe_session(step, 2, "ddp", [("NVIDIA H200", 150_142_189_568)], "12.8"))
        first, second = read_sessions(tmp_path)
        assert [first["first_step"], second["first_step"]] == [1, 11]
        assert first["gpus"] == [{"name": "NVIDIA H200", "memory_gib": 139.83}]
        assert first["versions"]["torch"]
        assert first["started"].endswith("+00:00")
        assert re.fullmatch(r"\d{4}(-\d\d){2}T(\d\d:){2}\d\d\+00:00", first["started"])

    def test_no_secret_is_recorded(self, tmp_path, monkeypatch):
        words = [
            "distiller", "--api-key", "s3cret", "tracking.token=s3cret", "--wandb_token=s3cret", "a.Password: s3cret",
            "https://me:s3cret@host/data?key=s3cret", "optim.lr=1e-3", "{hub_token: s3cret, b: 1}",
        ]  # fmt: skip
        shown = without_secrets(words)
        assert "s3cret" not in " ".join(shown)
        assert shown[1] == "--api-key"
        assert "optim.lr=1e-3" in shown
        monkeypatch.setenv("WANDB_API_KEY", "s3cret")
        monkeypatch.setattr(sys, "argv", words)
        assert "s3cret" not in json.dumps(describe_session(1, 1, "single", [], None))

    def test_the_commit_of_a_repository_and_its_changes(self, tmp_path, monkeypatch):
        assert git_state(tmp_path) is None
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        (tmp_path / "file").write_text("one")
        for words in (["init", "-q"], ["add", "file"], [*who, "commit", "-qm", "first"]):
            subprocess.run(["git", *words], cwd=tmp_path, check=True)
        state = git_state(tmp_path)
        assert state is not None
        assert re.fullmatch("[0-9a-f]{40}", state["commit"])
        assert state["is_dirty"] is False
        (tmp_path / "file").write_text("two")
        assert git_state(tmp_path) == state | {"is_dirty": True}
        monkeypatch.setenv("PATH", "")
        assert git_state(tmp_path) is None

    def test_a_full_disk_does_not_end_the_run(self, tmp_path, capfd):
        append_session(tmp_path / "missing", {})
        assert "it lacks this session, training goes on" in capfd.readouterr().err


class TestCharts:
    def test_colours_have_contrast_on_both_pages(self):
        def luminance(colour: str) -> float:
            parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
            linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
            return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

        style = (Path(commands.__file__).parents[1] / "report" / "page.css").read_text()
        pages = re.findall(r"--page: (#\w{6})", style)
        assert len(pages) == 2
        for page in map(luminance, pages):
            for colour in map(luminance, COLOURS):
                assert (max(page, colour) + 0.05) / (min(page, colour) + 0.05) >= 3

    def test_long_series_keep_their_spikes_and_short_tables(self):
        values: list[float | None] = [1.0] * 100_000
        values[54_321], values[7] = 9.0, None
        kept = extremes(values)
        assert len(kept) <= MAX_POINTS
        assert {0, 54_321, 99_999} <= set(kept)
        chart = Chart("Loss", "update", "loss", (Line("loss", range(1, 100_001), values),))
        head, rows = numbers_of(chart)
        assert head == ["update", "loss"]
        assert len(rows) <= MAX_ROWS
        assert (rows[0], rows[-1]) == (["1", "1"], ["100000", "1"])
        assert "highest 9 at 54322" in describe(chart)
        assert thinned(3, 50) == [0, 1, 2]

    def test_an_axis_is_logarithmic_where_values_differ_much(self):
        for values, kind in (([1.0, 0.01], "log"), ([1.0, 0.5], None), ([1.0, -0.01], None), ([1.0, 0.0], None)):
            chart = Chart("Loss", "update", "loss", (Line("loss", [1, 2], values),), may_be_logarithmic=True)
            axis = json.loads(figure_json(chart))["layout"]["yaxis"]
            assert axis.get("type") == kind
            assert axis["title"]["text"] == ("loss (logarithmic)" if kind else "loss")

    def test_nested_figures_of_any_depth(self):
        report = {
            "mse": {"low": 0.1, "high": 0.2},
            "by_band": {"low": {"kl": 1.0, "deep": {"x": 4.0}}, "high": {"kl": 2.0, "note": "none"}},
            "name": "text",
        }
        assert band_figures(report) == {
            "mse": {"low": 0.1, "high": 0.2},
            "by band: kl": {"low": 1.0, "high": 2.0},
            "by band, low, deep": {"x": 4.0},
        }
        assert split_side("by band: student_kl") == ("by band: kl", "student")
        assert split_side("speed_ratio") == ("speed_ratio", None)


class TestTraining:
    def test_a_run_leaves_its_report_and_where_it_ran(self, make_recipe, capsys):
        recipe = make_recipe(train={"max_steps": 3})
        commands.train(recipe, False)
        folder = Path(recipe.output_dir)
        assert f"report: {folder / 'report.html'}" in capsys.readouterr().out
        page = Page(folder / "report.html")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert series(page.figures()["Training loss"], "loss") == ([1, 2, 3], [line["loss"] for line in lines])
        assert "finished after 3 updates" in page.texts["main"][0]
        (session,) = read_sessions(folder)
        assert (session["first_step"], session["engine"], session["world_size"]) == (1, "single", 1)
        assert session["gpus"] == []

    def test_a_resumed_session_adds_its_entry(self, make_recipe, fresh):
        commands.train(make_recipe(train={"max_steps": 2}), False)
        fresh()
        recipe = make_recipe(train={"max_steps": 4})
        commands.train(recipe, True)
        folder = Path(recipe.output_dir)
        assert [session["first_step"] for session in read_sessions(folder)] == [1, 3]
        page = Page(folder / "report.html")
        assert series(page.figures()["Training loss"], "loss")[0] == [1, 2, 3, 4]
        assert "All 2 sessions" in page.texts["caption"]

    def test_it_can_be_turned_off_and_a_failure_ends_no_run(self, make_recipe, capsys, monkeypatch, fresh):
        recipe = make_recipe(train={"max_steps": 2}, tracking={"report": False})
        commands.train(recipe, False)
        folder = Path(recipe.output_dir)
        assert not (folder / "report.html").exists()
        shutil.rmtree(folder)
        fresh()
        monkeypatch.setitem(sys.modules, "distiller.report.page", None)
        commands.train(make_recipe(train={"max_steps": 2}), False)
        assert not (folder / "report.html").exists()
        assert (folder / "summary.json").exists()
        assert "report.html was not written" in capsys.readouterr().err


@pytest.fixture(scope="module")
def browser():
    if (program := find_browser()) is None:
        pytest.skip("no Chromium is installed")
    found = Browser(program)
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(browser, tmp_path, width, scheme):
    folders = [write_run(tmp_path / "a-run-with-a-rather-long-name" / name) for name in ("one", "two")]
    (folders[0] / "samples.txt").write_text("word " * 500 + "x" * 3000)
    page = report(folders, tmp_path / "page.html")
    browser.messages.clear()
    browser.requested.clear()
    browser.open(page, width, scheme=scheme)
    assert browser.messages == []
    assert {url for url in browser.requested if not url.startswith("data:")} == {page.resolve().as_uri()}
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.evaluate("document.querySelectorAll('.plot .main-svg').length") > 20
    # Every chart's text has the page's colour, also after a change.
    for now in (scheme, "light" if scheme == "dark" else "dark"):
        browser.set_scheme(now)
        colours = browser.evaluate(
            "new Promise((done) => setTimeout(() => done([getComputedStyle(document.body).color, "
            "...Array.from(document.querySelectorAll('.ytick text'), (text) => getComputedStyle(text).fill)]), 1500))"
        )
        assert len(set(colours)) == 1, now
    # The first stop of the keyboard is the link to the content, which then is seen.
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.className") == "skip"
    assert browser.evaluate("document.activeElement.getBoundingClientRect().left >= 0")
    assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
