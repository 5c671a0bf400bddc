"""Engines on real GPUs against one process on the CPU: run by hand, `python -m pytest tests/gpu`.

CI has no GPU. Float32 here is IEEE float32 (no TF32 in matrix products), so the series agree to rounding.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from tests import toys
from tests.launch.launching import CONFIGS, launch

NUM_GPUS = torch.cuda.device_count()
ENGINES = {
    "single_gpu": ("single", 1),
    "ddp": ("ddp", 2),
    "zero2": ("deepspeed-zero2", 2),
    "zero3_offload": ("deepspeed-zero3-offload", 2),
}
pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU")


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    pipeline = toys.make_pipeline(folder / "pipeline", num_experts=2)
    recipe = toys.recipe(folder, pipeline, train={"max_steps": 8, "batch_size": 8, "log_every": 1, "num_workers": 1})
    recipe["cache_dir"], recipe["teacher"]["dtype"] = str(folder / "cache"), "float32"
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    result = train(folder, "cpu", folder / "reference", "train.mixed_precision=no")
    assert result.code == 0, result.stderr
    return folder


def train(toy: Path, name: str, output_dir: Path, *overrides: str):
    return launch(
        CONFIGS / f"{name}.yaml", "train", str(toy / "recipe.yaml"), f"output_dir={output_dir}", *overrides, timeout_s=300
    )


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_engines_on_gpus_equal_one_cpu_process(toy, name, precision):
    engine, num_processes = ENGINES[name]
    if num_processes > NUM_GPUS:
        pytest.skip(f"needs {num_processes} GPUs")
    output_dir = toy / f"{name}-{precision}"
    options = [f"train.batch_size={8 // num_processes}", f"train.mixed_precision={precision}"]
    result = train(toy, name, output_dir, *options)
    assert result.code == 0, result.stderr
    summary = json.loads((output_dir / "summary.json").read_text())
    assert (summary["engine"], summary["mixed_precision"]) == (engine, precision)
    ours, theirs = toys.read_metrics(output_dir), toys.read_metrics(toy / "reference")
    errors = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(ours, theirs, strict=True)]
    vector, reference = toys.student_vector(output_dir), toys.student_vector(toy / "reference")
    distance = ((vector - reference).norm() / reference.norm()).item()
    print(f"{name:14} {precision:5} loss within {max(errors):.1e}, student within {distance:.1e}")
    if precision == "no":
        toys.assert_same_run(output_dir, toy / "reference")
    else:
        # bfloat16 keeps 8 bits: single products are off by up to 0.4%; AdamW turns that into more in early steps.
        assert max(errors) < 0.02
    assert ours[-1]["memory/gpu_peak_gib"] > 0
    assert ours[-1]["perf/teacher_ms"] > 0
    assert ours[-1]["perf/student_ms"] > 0


def test_activation_checkpointing_changes_nothing_but_memory(toy):
    for precision in ("no", "bf16"):
        dirs = []
        for flag in ("true", "false"):
            dirs.append(toy / f"checkpointing-{flag}-{precision}")
            options = [f"train.gradient_checkpointing={flag}", f"train.mixed_precision={precision}"]
            assert train(toy, "single_gpu", dirs[-1], *options).code == 0
        toys.assert_same_run(*dirs)


def test_fp16_tracks_its_scale_and_counts_skipped_steps(toy):
    result = train(toy, "single_gpu", toy / "fp16", "train.mixed_precision=fp16")
    assert result.code == 0, result.stderr
    metrics = toys.read_metrics(toy / "fp16")
    assert metrics[-1]["optim/loss_scale"] > 0
    assert metrics[-1]["optim/skipped_steps"] >= 0


def test_resuming_on_a_gpu_is_bitwise(toy):
    whole, broken = toy / "gpu-whole", toy / "gpu-broken"
    assert train(toy, "single_gpu", whole).code == 0
    assert train(toy, "single_gpu", broken, "train.max_steps=4").code == 0
    assert train(toy, "single_gpu", broken, "--resume").code == 0
    toys.assert_same_run(broken, whole, loss_tolerance=0.0, tolerance=0.0)
