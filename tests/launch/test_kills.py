"""Runs on two ranks that are killed at any moment and continued: the student is that of an unbroken run, bit for bit.

    DISTILLER_KILLS=30 python -m pytest tests/launch/test_kills.py

kills as often as that.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests import toys
from tests.launch.launching import CONFIGS, begin, launch

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("DISTILLER_KILLS", "3"))
# A run goes on for some steps before it is seen and hit.
STEPS = 20 * KILLS
ASKED_AHEAD = (
    ("teacher.placement=replicated", "teacher.prefetch_steps=2"),
    ("teacher.placement=cpu", "teacher.prefetch_steps=1"),
    ("teacher.placement=dedicated", "teacher.devices=2", "teacher.prefetch_steps=3"),
)
"""In turn: asked by the loop's own thread, by another one, and in other processes. The unbroken run asks for one update
at a time."""


@pytest.mark.timeout(300 + 120 * KILLS)
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(tmp_path):
    """Half of the moments lie inside a save. A third of the kills hits one rank alone, and the rest all processes."""
    pipeline = toys.make_pipeline(tmp_path / "pipeline")
    options = {
        "cache_dir": str(tmp_path / "cache"),
        "train": {"max_steps": STEPS, "batch_size": 4, "log_every": 1, "ema_decay": 0.9},
        "checkpoint": {"every_steps": 1},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(toys.recipe(tmp_path, pipeline, **options)))
    config, train = CONFIGS / "cpu_2proc.yaml", ["train", str(tmp_path / "recipe.yaml")]
    result = launch(config, *train, f"output_dir={tmp_path / 'whole'}")
    assert result.code == 0, result.stderr

    moments, run_dir, done = random.Random(7), tmp_path / "broken", 0
    for kill in range(KILLS):
        running = begin(config, run_dir, *train, *ASKED_AHEAD[kill % len(ASKED_AHEAD)], "--resume")
        # By its checkpoints: metrics.jsonl still has lines of the run before, until they are cut off.
        target = min(done + moments.randint(1, 8), STEPS - 1)
        running.wait_until(lambda target=target: newest(run_dir) >= target, 240)
        if moments.random() < 0.5:
            saves = run_dir / "checkpoints"
            running.wait_until(lambda saves=saves: bool(list(saves.glob(".*.partial"))), 60)
        time.sleep(moments.uniform(0, 0.1))
        if moments.random() < 1 / 3:
            # It may have ended by itself meanwhile.
            with contextlib.suppress(psutil.NoSuchProcess):
                os.kill(running.rank(moments.randint(0, 1)), signal.SIGKILL)
            running.wait_until_gone(60)
        else:
            running.kill_all()
        done = newest(run_dir)
    result = launch(config, *train, f"output_dir={run_dir}", *ASKED_AHEAD[0], "--resume")
    assert result.code == 0, result.stderr
    toys.assert_same_run(run_dir, tmp_path / "whole", loss_tolerance=0.0, tolerance=0.0)


def newest(run_dir: Path) -> int:
    """The step of the newest complete checkpoint."""
    steps = [int(file.parent.name.removeprefix("step-")) for file in run_dir.glob("checkpoints/step-*/progress.json")]
    return max(steps, default=0)
