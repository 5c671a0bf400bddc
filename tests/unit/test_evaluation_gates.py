"""`distiller evaluate --min` and `--max`: bounds on figures of the report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from distiller import commands
from distiller.cli import main
from distiller.commands.gates import check_keys, figures_of, make_gates
from distiller.config.loading import parse
from distiller.errors import UserError
from tests import classifiers

REPORT: dict[str, Any] = {
    "accuracy": 0.8,
    "ratio": None,
    "device": "cpu",
    "count": 3,
    "bands": {"0.0-0.2": {"cosine": 0.25}},
}
FIGURES = {"accuracy": 0.8, "count": 3, "bands.0.0-0.2.cosine": 0.25}


def test_figures_are_the_numbers_under_dotted_keys():
    assert figures_of(REPORT) == FIGURES


@pytest.mark.parametrize(
    ("side", "key", "bound", "missed"),
    [
        ("min", "accuracy", 0.8, None),
        ("min", "accuracy", 0.81, "accuracy is 0.8, below --min 0.81"),
        ("max", "accuracy", 0.8, None),
        ("max", "count", 2, "count is 3, above --max 2"),
        ("max", "bands.0.0-0.2.cosine", 0.2, "bands.0.0-0.2.cosine is 0.25, above --max 0.2"),
        ("min", "ratio", 0, "ratio has no value, and --min demands 0"),
    ],
)
def test_a_bound_may_be_reached_and_not_be_passed(side, key, bound, missed):
    pairs = [(key, bound)]
    (gate,) = make_gates(pairs, []) if side == "min" else make_gates([], pairs)
    assert gate.describe_miss(FIGURES) == missed


def test_a_figure_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(UserError, match=r"--max: acuracy is no figure.*mean 'accuracy'\? there are accuracy, b"):
        check_keys(make_gates([], [("acuracy", 1.0)]), ["accuracy", "b"])
    check_keys(make_gates([("harness.task.acc", 1.0)], []), ["accuracy"], ["harness."])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gates")
    teacher = classifiers.save_classifier(folder / "teacher", classifiers.resnet_config())
    pictures, student = classifiers.save_pictures(folder / "pictures"), classifiers.resnet_config(depths=[1, 1])
    recipe = classifiers.recipe(folder, teacher, pictures, student, train={"max_steps": 1})
    commands.train(parse(recipe), resume=False)
    return folder / "run"


@pytest.mark.parametrize("text", ["accuracy", "=3", "accuracy=", "accuracy=high", "accuracy=nan", "accuracy=inf"])
def test_a_bound_is_a_number(capsys, text):
    assert main(["evaluate", "nowhere", "--min", text]) == 2
    assert f"argument --min: given '{text}'; give FIGURE=NUMBER" in capsys.readouterr().err


def test_an_unknown_figure_is_refused_before_weights_are_read(run_dir, tmp_path, capsys):
    broken = shutil.copytree(run_dir, tmp_path / "run")
    (broken / "student" / "model.safetensors").write_bytes(b"damaged")
    assert main(["evaluate", str(broken), "--min", "student_acuracy=0.5"]) == 2
    said = capsys.readouterr().err
    assert "did you mean 'student_accuracy'? there are accuracy_ratio, " in said
    assert said.count("\n") == 1


def test_missed_gates_are_said_in_one_line_after_the_figures_are_stored(run_dir, capsys):
    gates = ["--min", "size_ratio=1e6", "--max", "agreement=-1", "--min", "num_samples=1"]
    recipe_gate = "evaluation.min_accuracy_ratio=1000"
    assert main(["evaluate", str(run_dir), *gates[:2], recipe_gate, *gates[2:]]) == 3
    printed = capsys.readouterr()
    assert "size_ratio " in printed.out
    *_, cost, report_line = printed.out.splitlines()
    assert report_line == f"report: {run_dir}/report.html"
    assert "of the teacher's parameters, at " in cost
    (line,) = [line for line in printed.err.splitlines() if line.startswith("distiller: ")]
    report = json.loads((run_dir / "summary.json").read_text())["evaluation"]
    assert "evaluation.min_accuracy_ratio is 100000.0% and" in line
    assert "; size_ratio is " in line
    assert f"; agreement is {report['agreement']:.6g}, above --max -1" in line
    assert "num_samples" not in line


def test_gates_that_are_kept_end_with_0(run_dir):
    assert main(["evaluate", str(run_dir), "--min", "size_ratio=1", "--max", "student_calibration_error=1"]) == 0
