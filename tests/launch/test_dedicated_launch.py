"""Runs under a launcher whose teacher has processes of its own: the student, kills of either side, and what is left."""

from __future__ import annotations

import os
import random
import signal
import time

import psutil
import pytest
import yaml

from tests import toys
from tests.launch.launching import CONFIGS, Running, begin, launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = CONFIGS / "cpu_2proc.yaml"
STEPS = 40
DEDICATED = ("teacher.placement=dedicated", "teacher.devices=2", "teacher.prefetch_steps=2")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    options = {
        "cache_dir": str(folder / "cache"),
        "train": {"max_steps": STEPS, "batch_size": 4, "log_every": 1},
        "checkpoint": {"every_steps": 1},
    }
    pipeline = toys.make_pipeline(folder / "pipeline")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(toys.recipe(folder, pipeline, **options)))
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def whole(recipe):
    """The output folder of an unbroken run whose teacher is on every rank."""
    run_dir = recipe.parent / "whole"
    result = launch(CONFIG, "train", str(recipe), f"output_dir={run_dir}")
    assert result.code == 0, result.stderr
    return run_dir


def servers(running: Running) -> list[psutil.Process]:
    """The teacher's processes."""
    return [
        process
        for process in psutil.Process(running.pid).children(recursive=True)
        if any("processes.server" in word for word in process.cmdline())
    ]


def test_a_teacher_s_process_that_is_killed_ends_the_run_which_resumes_bit_for_bit(recipe, whole, tmp_path):
    moments = random.Random(3)
    for target in (3, 17):
        running = begin(CONFIG, tmp_path, "train", str(recipe), *DEDICATED, "--resume")
        running.wait_until(lambda target=target: bool(list(tmp_path.glob(f"checkpoints/step-{target}"))), 240)
        time.sleep(moments.uniform(0, 0.2))
        # What the ranks have started belongs to the launch.
        found = servers(running)
        assert len(found) == 2
        found[moments.randint(0, 1)].send_signal(signal.SIGKILL)
        assert running.wait_until_gone(60) == 1
        assert psutil.wait_procs(found, 10)[1] == []
        assert any("the teacher's process" in line and "--resume" in line for line in running.lines), running.output
    result = launch(CONFIG, "train", str(recipe), f"output_dir={tmp_path}", *DEDICATED, "--resume")
    assert result.code == 0, result.stderr
    toys.assert_same_run(tmp_path, whole, loss_tolerance=0.0, tolerance=0.0)


def test_a_launcher_that_is_killed_leaves_no_process(recipe, tmp_path):
    running = begin(CONFIG, tmp_path, "train", str(recipe), *DEDICATED, "checkpoint.every_steps=null")
    running.wait_until(lambda: len(servers(running)) == 2, 240)
    running.wait_for_step(2)
    found = servers(running)
    os.kill(running.pid, signal.SIGKILL)
    running.wait_until_gone(60)
    assert psutil.wait_procs(found, 60)[1] == []


def test_a_run_that_is_asked_to_stop_saves_and_ends_its_processes(recipe, whole, tmp_path):
    running = begin(CONFIG, tmp_path, "train", str(recipe), *DEDICATED)
    running.wait_for_step(5)
    found = servers(running)
    # As Ctrl-C does, to every process of the terminal.
    for process in psutil.Process(running.pid).children(recursive=True):
        process.send_signal(signal.SIGINT)
    running.wait_until_gone(60)
    assert psutil.wait_procs(found, 10)[1] == []
    result = launch(CONFIG, "train", str(recipe), f"output_dir={tmp_path}", "--resume")
    assert result.code == 0, result.stderr
    toys.assert_same_run(tmp_path, whole, loss_tolerance=0.0, tolerance=0.0)
