"""What a training run prints: the overview, the progress and the closing table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from distiller.cli import main
from distiller.commands.closing_table import closing_table
from distiller.run_overview import in_words
from distiller.training.timing import parts_of_update
from tests import toys

SUMMARY: dict[str, Any] = {
    "steps": 1200,
    "sessions": 1,
    "samples_per_s": 157.94,
    "wall_s": 95.0,
    "final_loss": 0.61384,
    "held_out_loss": None,
    "best": None,
    "gpu_peak_gib": None,
    "expected_gpu_peak_gib": None,
}
METRICS = {"perf/step_ms": 200.0, "perf/teacher_ms": 120.0, "perf/student_ms": 60.0, "perf/optimizer_ms": None}


def rows_of(text: str) -> dict[str, str]:
    return {name: words for name, _, words in (line.partition("  ") for line in text.splitlines()) if name.isalpha()}


def test_the_closing_table_has_what_is_known(tmp_path):
    (tmp_path / "samples.png").touch()
    assert closing_table(tmp_path, SUMMARY, METRICS) == "\n".join(
        [
            "finished   1,200 updates in 01:35; 157.9 samples/s in the loop",
            "loss       0.6138",
            "time       teacher 60%, student 30%",
            f"student    {tmp_path}/student",
            f"samples    {tmp_path}/samples.png",
            f"next       distiller evaluate {tmp_path}",
        ]
    )


def test_the_closing_table_of_a_resumed_run_on_a_gpu(tmp_path):
    summary = SUMMARY | {"sessions": 3, "held_out_loss": 0.7, "best": {"step": 800, "loss": 0.65}}
    summary |= {"gpu_peak_gib": 17.754, "expected_gpu_peak_gib": 17.9}
    table = closing_table(tmp_path, summary, METRICS | {"optim/skipped_steps": 2}).splitlines()
    assert "finished   1,200 updates in 01:35 (3 sessions); 157.9 samples/s in the loop" in table
    assert "loss       0.6138, on held-out data 0.7, the lowest 0.65 after update 800" in table
    assert "memory     17.75 GiB of a GPU, predicted 17.90" in table
    assert "left out   2 updates, whose loss or gradient was not finite" in table
    assert f"best       distiller export {tmp_path}/checkpoints/step-800" in table


def test_without_a_finite_loss_none_is_shown(tmp_path):
    table = closing_table(tmp_path, SUMMARY | {"final_loss": None, "samples_per_s": None}, {})
    assert [line.split()[0] for line in table.splitlines()] == ["finished", "student", "next"]


@pytest.mark.parametrize(("count", "words"), [(14_288_491_584, "14.3 B"), (397_000_000, "397 M"), (26_512, "26,512")])
def test_numbers_of_parameters_in_words(count, words):
    assert in_words(count) == words


def test_the_parts_of_an_update_are_shares_the_longest_first():
    assert list(parts_of_update(METRICS).items()) == [("teacher", 0.6), ("student", 0.3)]
    assert parts_of_update({"perf/step_ms": 1.0}) == {}


def test_a_run_says_what_it_does_before_and_after(tmp_path, capsys):
    recipe = toys.recipe(tmp_path, toys.make_pipeline(tmp_path / "teacher"), rollout={"enabled": False})
    recipe["train"]["max_steps"] = 2
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    options = ["teacher.placement=auto", "data.held_out=0.2", "evaluation.every_steps=1", "train.batch_size=4"]
    assert main(["train", str(tmp_path / "recipe.yaml"), *options, "train.samples_per_update=8"]) == 0
    printed = capsys.readouterr()
    rows = rows_of(printed.out)
    assert rows["placement"].strip() == "replicated, chosen by auto"
    assert rows["updates"].strip() == "2, each of 8 samples (batch 4 x accumulation 2 x 1 processes)"
    assert " times the teacher's" in printed.out
    assert rows["engine"].strip() == "single on 1 x cpu, mixed precision no"
    assert rows["output"].strip() == recipe["output_dir"]
    assert rows["finished"].strip().startswith("2 updates in ")
    assert "held out " in printed.err
    # What the loop does next is a continuation of what was done.
    arguments = ["train", str(tmp_path / "recipe.yaml"), *options, "train.samples_per_update=8", "train.max_steps=3"]
    assert main([*arguments, "--resume"]) == 0
    assert rows_of(capsys.readouterr().out)["updates"].strip().startswith("1, each of 8 samples")


def test_libraries_say_nothing_that_nobody_can_act_on(tmp_path):
    """The whole output of a process; bitsandbytes and transformers write to the log while they are imported."""
    recipe = toys.recipe(tmp_path, toys.make_pipeline(tmp_path / "teacher"), rollout={"enabled": False})
    recipe["train"]["max_steps"] = 1
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "distiller", "train", str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.replace("\r", "\n").splitlines() if line.strip()]
    known = ("encode prompts: ", "step 1/1: ", "attention kernels: ", "note: ")
    assert [line for line in lines if not line.lstrip().startswith(known)] == []
