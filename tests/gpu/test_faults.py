"""Faults on real GPUs: run by hand, `python -m pytest tests/gpu/test_faults.py`. CI has no GPU."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from distiller.data import rng
from distiller.student_state.moving_average import MovingAverage
from distiller.student_state.plain import PlainState
from distiller.training.loop import train
from tests import toys
from tests.gpu.ranks import NUM_GPUS, run_on_gpus
from tests.launch.launching import CONFIGS, begin
from tests.launch.test_bad_batches import make_toy
from tests.toy_task import DIM, LinearTeacher, TokenTask, build_toy_run, toy_recipe

pytestmark = [
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
ENDLESS = ["train.max_steps=1000000", "checkpoint.every_steps=1000000", "train.batch_size=4"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    return make_toy(folder, {"teacher": {"path": str(toys.make_pipeline(folder / "pipeline")), "dtype": "float32"}})


class DeviceTeacher(LinearTeacher):
    """On the GPU, without a copy in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = rng.noise(9, 0, 0, (DIM, DIM)).cuda()


class WaitlessTask(TokenTask):
    """Makes every wait of the host for the GPU an error, between the logged updates."""

    def __init__(self) -> None:
        self.num_updates = 0

    def to_device(self, batch, device):
        self.num_updates += 1
        torch.cuda.set_sync_debug_mode("error" if 1 < self.num_updates < 8 else "default")
        # One pageable copy a sample would wait; a real batch is page-locked.
        return [(sample_id, tokens.pin_memory().to(device, non_blocking=True)) for sample_id, tokens in batch]


def test_a_healthy_update_makes_the_host_wait_for_nothing(tmp_path):
    """With a moving average; the first and the last update are logged, which waits."""
    recipe = toy_recipe(tmp_path, batch_size=8, log_every=100)
    run = build_toy_run(recipe, task=WaitlessTask(), teacher=DeviceTeacher(), cpu=False)
    run.average = MovingAverage(PlainState(run.accelerator, run.student, run.optimizer), 0.9)
    try:
        train(run)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run_toy(toy: Path, name: str, folder: Path, *overrides: str) -> list[dict]:
    run_on_gpus(CONFIGS / f"{name}.yaml", folder, "train", str(toy / "recipe.yaml"), *overrides)
    return toys.read_metrics(folder)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("single_gpu", "no"),
        ("single_gpu", "bf16"),
        ("single_gpu", "fp16"),
        ("ddp", "no"),
        ("ddp", "fp16"),
        ("zero2", "bf16"),
        ("zero3_offload", "no"),
        ("fsdp2", "no"),
        ("fsdp2", "bf16"),
        ("fsdp2", "fp16"),
        ("fsdp1", "fp16"),
    ],
)
def test_bad_updates_are_left_out(toy, name, precision):
    folder = toy / f"{name}-{precision}"
    batch_size = 8 if name == "single_gpu" else 4
    lines = run_toy(toy, name, folder, f"train.mixed_precision={precision}", f"train.batch_size={batch_size}")
    bad_steps = [line["step"] for line in lines if line["loss"] is None]
    assert len(bad_steps) == 2
    # fp16's scaler may begin with a scale that is too high.
    assert lines[-1]["optim/skipped_steps"] == 2 or precision == "fp16"
    rows = [json.loads(line) for line in (folder / "bad_batches.jsonl").read_text().splitlines()]
    assert sorted({row["step"] for row in rows}) == bad_steps
    assert torch.isfinite(toys.student_vector(folder)).all()


@two_gpus
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_stops_all_ranks_with_a_checkpoint(toy, tmp_path, number):
    running = begin(CONFIGS / "ddp.yaml", tmp_path / "run", "train", str(toy / "healthy.yaml"), *ENDLESS)
    running.wait_for_step(20)
    os.kill(running.pid if number == signal.SIGTERM else running.rank(1), number)
    running.wait_until_gone(40)
    (line,) = running.lines
    found = re.fullmatch(rf"distiller: stopped by {number.name} at step (\d+); continue with --resume", line)
    assert found
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step-{found[1]}"


@two_gpus
def test_a_killed_rank_ends_the_run_within_a_minute(toy, tmp_path):
    """NCCL waits for the dead rank; torch's launcher and our time limit do not."""
    running = begin(CONFIGS / "ddp.yaml", tmp_path / "run", "train", str(toy / "healthy.yaml"), *ENDLESS)
    running.wait_for_step(20)
    begun = time.monotonic()
    os.kill(running.rank(1), signal.SIGKILL)
    running.wait_until_gone(60)
    print(f"ended {time.monotonic() - begun:.1f} s after the kill: {running.lines}")
    assert running.lines == ["distiller: rank 1 of 2 is gone; continue with --resume"]
