"""Engines on real GPUs against one process: run by hand, `python -m pytest tests/gpu -s`. CI has no GPU."""

from __future__ import annotations

import json
from ctypes.util import find_library
from pathlib import Path

import pytest
import yaml

from tests import toys
from tests.gpu.ranks import NUM_GPUS, run_on_gpus
from tests.launch.launching import CONFIGS

ENGINES = {
    "ddp": "ddp",
    "zero2": "deepspeed-zero2",
    "zero3_offload": "deepspeed-zero3-offload",
}
pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU")


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    pipeline = toys.make_pipeline(folder / "pipeline", num_experts=2)
    recipe = toys.recipe(folder, pipeline, train={"max_steps": 8, "batch_size": 8, "log_every": 1, "num_workers": 1})
    recipe["cache_dir"], recipe["teacher"]["dtype"] = str(folder / "cache"), "float32"
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module")
def float32(toy) -> Path:
    """One GPU, float32."""
    return train(toy, "single_gpu", toy / "float32", "train.mixed_precision=no")


@pytest.fixture(scope="module")
def bfloat16(toy, float32) -> Path:
    """One GPU, bfloat16."""
    return train(toy, "single_gpu", toy / "bfloat16", "train.mixed_precision=bf16")


def train(toy: Path, name: str, output_dir: Path, *overrides: str) -> Path:
    return run_on_gpus(CONFIGS / f"{name}.yaml", output_dir, "train", str(toy / "recipe.yaml"), *overrides)


def distances(run_dir: Path, reference_dir: Path) -> tuple[float, float]:
    ours, theirs = toys.read_metrics(run_dir), toys.read_metrics(reference_dir)
    losses = max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True))
    vector, reference = toys.student_vector(run_dir), toys.student_vector(reference_dir)
    students = ((vector - reference).norm() / reference.norm()).item()
    print(f"{run_dir.name:24} against {reference_dir.name:10} loss within {losses:.1e}, student within {students:.1e}")
    return losses, students


def test_a_gpu_equals_a_cpu_in_float32(toy, float32):
    """Measured on H200: loss within 1.2e-7, student within 1.4e-6 (with TF32 in convolutions 3.4e-5 and 1.2e-4)."""
    losses, students = distances(float32, train(toy, "cpu", toy / "cpu"))
    assert losses < 2e-5
    assert students < 1e-5
    metrics = toys.read_metrics(float32)[-1]
    assert metrics["memory/gpu_peak_gib"] > 0
    assert metrics["perf/teacher_ms"] > 0
    assert metrics["perf/student_ms"] > 0


@pytest.mark.parametrize("name", ENGINES)
def test_engines_equal_one_gpu_in_float32(toy, float32, name):
    run_dir = train(toy, name, toy / f"{name}-float32", "train.batch_size=4", "train.mixed_precision=no")
    assert json.loads((run_dir / "summary.json").read_text())["engine"] == ENGINES[name]
    losses, students = distances(run_dir, float32)
    assert losses < 2e-5
    assert students < 1e-5


@pytest.mark.skipif(find_library("aio") is None, reason="needs libaio")
@pytest.mark.parametrize(("name", "precision"), [("zero3_nvme", "no"), ("zero3_nvme_optimizer", "bf16")])
def test_a_student_on_a_disk_equals_one_gpu(toy, request, name, precision):
    """Two parts of a run are bit for bit the run; and nothing stays on the disk."""
    disk, options = toy / f"{name}-disk", ["train.batch_size=4", f"train.mixed_precision={precision}"]
    disk.mkdir()
    settings = (
        (CONFIGS.parent / "ds_configs" / f"{name}.json")
        .read_text()
        .replace('"nvme_path": "auto"', f'"nvme_path": "{disk}"')
    )
    (toy / f"{name}.json").write_text(settings)
    launch_file = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    launch_file["deepspeed_config"]["deepspeed_config_file"] = str(toy / f"{name}.json")
    (toy / f"{name}.yaml").write_text(yaml.safe_dump(launch_file))
    command = ["train", str(toy / "recipe.yaml"), *options]
    whole = run_on_gpus(toy / f"{name}.yaml", toy / f"{name}-whole", *command)
    losses, students = distances(whole, request.getfixturevalue("float32" if precision == "no" else "bfloat16"))
    assert losses < (2e-5 if precision == "no" else 0.01)
    assert students < 1e-5 or precision == "bf16"
    for more in ("train.max_steps=4", "--resume"):
        broken = run_on_gpus(toy / f"{name}.yaml", toy / f"{name}-broken", *command, more)
    toys.assert_same_run(broken, whole, loss_tolerance=0.0, tolerance=0.0)
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("name", ["zero2", "zero3_offload"])
def test_deepspeed_runs_in_bfloat16(toy, bfloat16, name):
    """bfloat16 keeps 8 bits, and DeepSpeed keeps the module itself in it: the series agree to a percent."""
    run_dir = train(toy, name, toy / f"{name}-bfloat16", "train.batch_size=4", "train.mixed_precision=bf16")
    assert json.loads((run_dir / "summary.json").read_text())["mixed_precision"] == "bf16"
    losses, _ = distances(run_dir, bfloat16)
    assert losses < 0.01


def test_bfloat16_is_close_to_float32(float32, bfloat16):
    losses, _ = distances(bfloat16, float32)
    assert losses < 0.01


def test_activation_checkpointing_changes_nothing(toy, bfloat16):
    options = ["train.gradient_checkpointing=true", "train.mixed_precision=bf16"]
    losses, students = distances(train(toy, "single_gpu", toy / "checkpointing", *options), bfloat16)
    assert losses < 1e-5
    assert students < 1e-4


def test_fp16_tracks_its_scale_and_counts_skipped_steps(toy, float32):
    metrics = toys.read_metrics(train(toy, "single_gpu", toy / "fp16", "train.mixed_precision=fp16"))
    assert metrics[-1]["optim/loss_scale"] > 0
    assert metrics[-1]["optim/skipped_steps"] == sum(line["grad_norm"] == float("inf") for line in metrics)


def test_resuming_on_a_gpu_is_bitwise(toy, bfloat16):
    options = ["train.mixed_precision=bf16"]
    broken = train(toy, "single_gpu", toy / "broken", "train.max_steps=4", *options)
    train(toy, "single_gpu", broken, "--resume", *options)
    assert distances(broken, bfloat16) == (0.0, 0.0)
