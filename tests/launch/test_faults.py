"""Real launches that are asked to stop, or lose a process: what they say, how soon they end, and what they leave."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from distiller.cli import main
from tests import toys
from tests.launch.launching import CONFIGS, Running, begin

ENDLESS = ["train.max_steps=1000000", "checkpoint.every_steps=1000000"]
BATCH = {"cpu": "train.batch_size=8", "cpu_2proc": "train.batch_size=4"}
DISTILLER = [sys.executable, "-m", "distiller"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return toys.write_recipe(tmp_path_factory.mktemp("faults"))


def started(toy: Path, name: str, run_dir: Path, *overrides: str) -> Running:
    running = begin(CONFIGS / f"{name}.yaml", run_dir, "train", str(toy / "recipe.yaml"), BATCH[name], *overrides)
    running.wait_for_step(2)
    return running


def step_stopped_at(running: Running, by: str) -> int:
    """The step of the only line, which is that of the newest checkpoint and of the last one logged."""
    (line,) = running.lines
    found = re.fullmatch(rf"distiller: stopped by {by} at step (\d+); continue with --resume", line)
    assert found, running.output
    step = int(found[1])
    assert (running.run_dir / "checkpoints" / "latest").read_text() == f"step-{step}"
    progress = json.loads((running.run_dir / "checkpoints" / f"step-{step}" / "progress.json").read_text())
    assert progress["step"] == step
    assert toys.read_metrics(running.run_dir)[-1]["step"] == step
    assert not list((running.run_dir / "checkpoints").glob(".*"))
    return step


@pytest.mark.parametrize(
    ("name", "number", "to_rank"),
    [
        pytest.param("cpu_2proc", signal.SIGTERM, None),
        pytest.param("cpu_2proc", signal.SIGUSR1, 1, marks=pytest.mark.slow),
        pytest.param("cpu_2proc", signal.SIGINT, None, marks=pytest.mark.slow),
        pytest.param("cpu", signal.SIGTERM, 0, marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_every_rank_after_one_update_with_a_checkpoint(toy, tmp_path, name, number, to_rank):
    running = started(toy, name, tmp_path / "run", *ENDLESS)
    os.kill(running.pid if to_rank is None else running.rank(to_rank), number)
    assert running.wait_until_gone(40) != 0
    step = step_stopped_at(running, number.name)
    # In this process, which has imported everything: a checkpoint of two ranks is read by one.
    more = [BATCH["cpu"], f"output_dir={tmp_path / 'run'}", f"train.max_steps={step + 2}", "--resume"]
    assert main(["train", str(toy / "recipe.yaml"), *more]) == 0
    steps = [line["step"] for line in toys.read_metrics(tmp_path / "run")]
    assert steps == list(range(1, step + 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "cpu_2proc"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_its_launcher_and_each_leaves_a_checkpoint(toy, tmp_path, name, number):
    """With one process `accelerate launch` forwards nothing; after SIGKILL nobody can."""
    running = started(toy, name, tmp_path / "run", *ENDLESS, "train.num_workers=1")
    os.kill(running.pid, number)
    running.wait_until_gone(40)
    forwards = name == "cpu_2proc" and number == signal.SIGTERM
    step_stopped_at(running, "SIGTERM" if forwards else "the launcher's death")


def test_a_killed_rank_ends_the_run_with_one_line(toy, tmp_path):
    running = started(toy, "cpu_2proc", tmp_path / "run", *ENDLESS)
    os.kill(running.rank(1), signal.SIGKILL)
    assert running.wait_until_gone(60) != 0
    assert running.lines == ["distiller: rank 1 of 2 is gone; continue with --resume"], running.output
    assert "Traceback" not in running.output.partition(running.lines[0])[0]
    # The agent shows the rank that it saw ending first: the killed one, or the one that missed it.
    last = running.output.splitlines()[-2]
    assert re.fullmatch(r"  traceback : (Signal 9 \(SIGKILL\) .*|distiller, rank 0: rank 1 of 2 is gone; .*)", last), (
        last
    )


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_ended_when_the_time_is_up(toy, tmp_path):
    """Rank 1 stands still, so the update under way has no end: NCCL would wait like this for a rank that is gone."""
    running = started(toy, "cpu_2proc", tmp_path / "run", *ENDLESS)
    stopped = running.rank(1)
    os.kill(stopped, signal.SIGSTOP)
    begun = time.monotonic()
    os.kill(running.rank(0), signal.SIGTERM)
    running.wait_until(lambda: bool(running.lines), 35)
    assert 20 < time.monotonic() - begun < 35
    words = "SIGTERM, and the update under way and its checkpoint took longer than 25 s; killed, continue with --resume"
    assert running.lines == [f"distiller: {words}"]
    os.kill(stopped, signal.SIGCONT)
    running.wait_until_gone(60)


@pytest.mark.slow
def test_a_second_run_in_the_folder_is_refused_and_a_dead_one_is_no_obstacle(toy, tmp_path):
    """And the exit code of a process that a signal stopped, which no launcher hides here."""
    arguments = ["train", str(toy / "recipe.yaml"), f"output_dir={tmp_path / 'run'}"]
    first = Running([*DISTILLER, *arguments, *ENDLESS], tmp_path / "run")
    first.wait_for_step(1)
    second = Running([*DISTILLER, *arguments, "--resume"], tmp_path / "run")
    assert second.wait_until_gone(120) == 2
    assert re.fullmatch(
        rf"distiller: output_dir: {tmp_path}/run is in use by another run \(process {first.pid} on \S+, since .*\); "
        r"wait for its end, or choose another folder with output_dir=...",
        *second.lines,
    )
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait_until_gone(40) == 128 + signal.SIGTERM
    step = step_stopped_at(first, "SIGTERM")
    # What a killed run leaves behind.
    (tmp_path / "run" / ".running").write_text('{"pid": 1, "host": "elsewhere", "since": "2001"}')
    third = Running([*DISTILLER, *arguments, f"train.max_steps={step + 1}", "--resume"], tmp_path / "run")
    assert third.wait_until_gone(120) == 0, third.output
    assert not (tmp_path / "run" / ".running").exists()


@pytest.mark.slow
def test_a_signal_before_the_loop_ends_the_process_at_once_and_what_was_drawn_stays(toy, tmp_path):
    options = [f"cache_dir={tmp_path / 'cache'}", "rollout.batch_size=1", "sampling.num_inference_steps=50"]
    command = [*DISTILLER, "train", str(toy / "recipe.yaml"), f"output_dir={tmp_path / 'run'}", *options]
    running = Running(command, tmp_path / "run")
    running.wait_until(lambda: len(list((tmp_path / "cache").glob("rollout-*.partial/*"))) >= 3, 240)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait_until_gone(20) == 128 + signal.SIGTERM
    assert running.lines == ["distiller: stopped by SIGTERM outside of the training loop; continue with --resume"]
    again = Running([*command, "--resume"], tmp_path / "run")
    assert again.wait_until_gone(240) == 0, again.output
    drawn = re.search(r"; (\d+) of 27 shards to draw", again.output)
    assert drawn is not None
    assert int(drawn[1]) <= 24
