"""Runs whose memory is used up in the second update: all ranks start again with another placement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from distiller.cli import main
from tests import toys
from tests.launch.launching import CONFIGS, Result, start

PROGRAM = str(Path(__file__).parent / "scarce_memory.py")
BATCH = {"cpu": "train.batch_size=8", "cpu_2proc": "train.batch_size=4"}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return toys.write_recipe(tmp_path_factory.mktemp("restart"))


def train(toy: Path, name: str, rank: str, placements: str, run: str, *overrides: str) -> Result:
    arguments = ["--config_file", str(CONFIGS / f"{name}.yaml"), PROGRAM, rank, placements, "train"]
    recipe = [str(toy / "recipe.yaml"), f"output_dir={toy / run}", "teacher.placement=auto", BATCH[name], *overrides]
    return start([*arguments, *recipe], 240)


def restarts(result: Result) -> list[str]:
    """The lines that say why a run starts again."""
    assert "Traceback" not in result.stderr
    return [line for line in result.stderr.splitlines() if "the run starts again" in line]


def test_one_rank_fails_while_the_other_waits_for_it_in_a_collective(toy):
    """Rank 1 fails where the teacher answers; rank 0 waits for its gradients."""
    result = train(toy, "cpu_2proc", "1", "replicated", "once")
    assert result.code == 0, result.stderr
    (line,) = restarts(result)
    assert line == (
        "teacher.placement auto: replicated takes more memory than was predicted (out of GPU memory in update 2, "
        "teacher); the run starts again with another placement: balanced or cpu or streamed or disk"
    )
    assert json.loads((toy / "once" / "summary.json").read_text())["placement"] == "balanced"


@pytest.mark.slow
def test_the_student_is_that_of_a_run_which_nothing_disturbs(toy):
    assert train(toy, "cpu_2proc", "7", "none", "plain").code == 0
    result = train(toy, "cpu_2proc", "1", "replicated,balanced", "twice")
    assert result.code == 0, result.stderr
    assert [line.rpartition(": ")[2] for line in restarts(result)] == [
        "balanced or cpu or streamed or disk",
        "cpu or streamed or disk",
    ]
    steps = [[line["step"] for line in toys.read_metrics(toy / run)] for run in ("plain", "twice")]
    assert steps[0] == steps[1]
    assert torch.equal(toys.student_vector(toy / "plain"), toys.student_vector(toy / "twice"))


@pytest.mark.slow
def test_one_process_with_loader_processes(toy):
    """Its children are there when it is replaced, and are ended by the new program."""
    result = train(toy, "cpu", "0", "replicated", "one", "train.num_workers=2")
    assert result.code == 0, result.stderr
    assert json.loads((toy / "one" / "summary.json").read_text())["placement"] == "balanced"


@pytest.mark.slow
def test_where_nothing_smaller_is_left_the_run_ends(toy):
    result = train(toy, "cpu", "0", "replicated,balanced,cpu", "none")
    assert result.code == 1
    assert result.stderr.count("the run starts again") == 2
    assert "distiller: out of GPU memory in update 2" in result.stderr


@pytest.mark.slow
def test_a_placement_that_the_recipe_names_is_kept(toy):
    result = train(toy, "cpu", "0", "replicated", "named", "teacher.placement=replicated")
    assert result.code == 1
    assert "starts again" not in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--auto-without=nowhere"], "--auto-without nowhere is no placement; choose one of replicated, "),
        (
            ["teacher.placement=disk", "--auto-without=cpu"],
            "--auto-without is for teacher.placement auto, and the recipe says disk",
        ),
        (
            [f"--auto-without={name}" for name in ("replicated", "balanced", "cpu", "streamed", "disk")],
            "teacher.placement auto: no placement fits but those that --auto-without leaves out (replicated, ",
        ),
    ],
)
def test_placements_that_auto_may_not_choose(toy, options, said, capsys):
    command = ["train", str(toy / "recipe.yaml"), f"output_dir={toy / 'refused'}", "teacher.placement=auto", *options]
    assert main(command) == 2
    assert said in capsys.readouterr().err
    assert not (toy / "refused").exists()
