"""FSDP on real GPUs against one process: run by hand, `python -m pytest tests/gpu/test_fsdp.py -s`. CI has no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import toys
from tests.gpu.ranks import NUM_GPUS, run_on_gpus
from tests.gpu.test_engines import distances
from tests.launch.launching import CONFIGS

pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU")

SIZE = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 2000}
NO_WRAP = {"fsdp_auto_wrap_policy": "NO_WRAP"}
TWICE = ["train.batch_size=2", "train.samples_per_update=8"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "offloaded": ("fsdp2_offload", {}),
    "by size, weights stay": ("fsdp2", SIZE | {"fsdp_reshard_after_forward": False}),
    "no units, recomputed": ("fsdp2", NO_WRAP | {"fsdp_activation_checkpointing": True}),
    "questionnaire": ("fsdp2", {"fsdp_cpu_ram_efficient_loading": True, "fsdp_state_dict_type": "FULL_STATE_DICT"}),
    "older, offloaded": ("fsdp1_offload", {}),
    "older, by size, weights stay": ("fsdp1", SIZE | {"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}),
    "older, hybrid, no units, flat": (
        "fsdp1",
        NO_WRAP | {"fsdp_reshard_after_forward": "HYBRID_SHARD", "fsdp_use_orig_params": False},
    ),
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    pipeline = toys.make_pipeline(folder / "pipeline")
    features = {"weight": 0.1, "student_blocks": [0], "teacher_blocks": [1]}
    recipe = toys.recipe(
        folder,
        pipeline,
        train={"max_steps": 6, "batch_size": 8, "log_every": 1, "ema_decay": 0.9},
        optim={"lr": 1e-3, "max_grad_norm": 1.0, "weight_decay": 0.1},
        task={"losses": {"features": features}},
    )
    recipe["cache_dir"], recipe["teacher"]["dtype"] = str(folder / "cache"), "float32"
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def train(toy: Path, name: str, config: str, *overrides: str, fsdp: dict[str, Any] | None = None) -> Path:
    """Trains into a folder of that name; `fsdp` changes the launch file."""
    content = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())
    if fsdp:
        content["fsdp_config"] |= fsdp
    file = toy / "launch.yaml"
    file.write_text(yaml.safe_dump(content))
    return run_on_gpus(file, toy / name, "train", str(toy / "recipe.yaml"), *overrides)


@pytest.fixture(scope="module")
def float32(toy) -> Path:
    return train(toy, "float32", "single_gpu", "train.mixed_precision=no")


@pytest.fixture(scope="module")
def bfloat16(toy) -> Path:
    return train(toy, "bfloat16", "single_gpu", "train.mixed_precision=bf16")


def check(run_dir: Path, reference: Path, engine: str, loss: float = 2e-5, student: float = 1e-5) -> None:
    assert json.loads((run_dir / "summary.json").read_text())["engine"] == engine
    losses, students = distances(run_dir, reference)
    assert losses < loss
    assert students < student


@pytest.mark.parametrize("config", ["fsdp2", "fsdp1"])
def test_accumulation_in_float32_equals_one_gpu_and_resumes_bitwise(toy, float32, config):
    options = [*TWICE, "train.mixed_precision=no"]
    whole = train(toy, f"whole-{config}", config, *options)
    check(whole, float32, config)
    broken = train(toy, f"broken-{config}", config, *options, "train.max_steps=3")
    train(toy, broken.name, config, *options, "--resume")
    assert distances(broken, whole) == (0.0, 0.0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_in_float32_equal_one_gpu(toy, float32, variant):
    """Offloaded ones too: the optimizer steps on the CPU, and clipping needs gloo for CPU tensors beside NCCL."""
    config, fsdp = VARIANTS[variant]
    options = ["train.batch_size=4", "train.mixed_precision=no"]
    # Two machines that share a GPU have a process each.
    is_replicated = NUM_GPUS < 2 and "hybrid" in variant
    run_dir = train(toy, variant.replace(", ", "-"), config, *options, fsdp=fsdp)
    check(run_dir, float32, "ddp" if is_replicated else config[:5])


@pytest.mark.parametrize("config", ["fsdp2", "fsdp1"])
def test_bfloat16_is_close_to_one_gpu(toy, bfloat16, config):
    """float32 masters, and gradients of micro-batches added in float32."""
    run_dir = train(toy, f"bfloat16-{config}", config, *TWICE, "train.mixed_precision=bf16")
    check(run_dir, bfloat16, config, loss=0.01, student=0.01)


@pytest.mark.parametrize("config", ["fsdp2", "fsdp1"])
def test_fp16_skips_steps_on_all_ranks_alike(toy, float32, config):
    run_dir = train(toy, f"fp16-{config}", config, "train.batch_size=4", "train.mixed_precision=fp16")
    metrics = toys.read_metrics(run_dir)
    assert metrics[-1]["optim/loss_scale"] > 0
    assert metrics[-1]["loss"] == pytest.approx(toys.read_metrics(float32)[-1]["loss"], abs=0.05)


def test_a_sharded_teacher_beside_a_sharded_student(toy, float32):
    options = ["train.batch_size=4", "train.mixed_precision=no", "teacher.placement=sharded"]
    check(train(toy, "sharded-teacher", "fsdp2", *options), float32, "fsdp2")
