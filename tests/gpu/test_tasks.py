"""Language models and classifiers on real GPUs: run by hand, `python -m pytest tests/gpu/test_tasks.py -s`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests import classifiers, toy_causal_lm, toys
from tests.gpu.ranks import NUM_GPUS, run_on_gpus
from tests.launch.launching import CONFIGS

pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU")
FLOAT32, BFLOAT16 = ("train.mixed_precision=no", "teacher.dtype=float32"), ("train.mixed_precision=bf16",)
OF_TWO = ("train.batch_size=2", "train.samples_per_update=8")
# Two ranks' batches of 4 are the reference's of 8.
OF_TWO_WHOLE = ("train.batch_size=4", "train.samples_per_update=8")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """A ResNet with running statistics, of which features are matched."""
    folder = tmp_path_factory.mktemp("classifiers")
    recipe = classifiers.recipe(
        folder,
        classifiers.save_classifier(folder / "teacher", classifiers.resnet_config()),
        classifiers.save_pictures(folder / "pictures"),
        classifiers.resnet_config(depths=[1, 1]),
        task={"losses": {"features": {"weight": 0.1, "student_blocks": [1], "teacher_blocks": [3]}}},
    )
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    return toy_causal_lm.write_recipe(tmp_path_factory.mktemp("language"))


def run(folder: Path, command: str, output_dir: str, name: str, *overrides: str) -> list[float]:
    """Trains, or caches; returns the losses."""
    run_on_gpus(CONFIGS / f"{name}.yaml", folder / output_dir, command, str(folder / "recipe.yaml"), *overrides)
    return [line["loss"] for line in toys.read_metrics(folder / output_dir)] if command == "train" else []


def distance(folder: Path, one: str, other: str) -> float:
    def vector(name: str) -> torch.Tensor:
        state = load_file(folder / name / "student" / "model.safetensors")
        return torch.cat([state[key].flatten().double() for key in sorted(state)])

    return ((vector(one) - vector(other)).norm() / vector(other).norm()).item()


def compare(folder: Path, name: str, losses: list[float], reference: list[float]) -> tuple[float, float]:
    difference = max(abs(ours - theirs) for ours, theirs in zip(losses, reference, strict=True))
    students = distance(folder, name, "reference")
    print(f"{folder.name:16} {name:16} losses within {difference:.1e}, student within {students:.1e}")
    return difference, students


@pytest.mark.timeout(400)
def test_classifiers_in_float32_are_the_same_under_every_engine(pictures):
    options = (*FLOAT32, "student.batch_norm=group")
    reference = run(pictures, "train", "reference", "single_gpu", *options)
    found = {}
    for name in ("ddp", "zero2", "zero3", "fsdp2"):
        losses = run(pictures, "train", name, name, *options, *OF_TWO)
        found[name] = compare(pictures, name, losses, reference)
    assert max(losses for losses, _ in found.values()) <= 2e-5
    assert max(students for _, students in found.values()) <= 1e-4


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["zero2", "fsdp2"])
def test_running_statistics_in_bfloat16_go_on_where_they_were(pictures, name):
    options = (*BFLOAT16, "student.batch_norm=batch", *OF_TWO_WHOLE, "train.ema_decay=0.9", "train.num_epochs=null")
    whole = run(pictures, "train", f"{name}-whole", name, *options)
    run(pictures, "train", f"{name}-broken", name, *options, "train.max_steps=3")
    broken = run(pictures, "train", f"{name}-broken", name, *options, "--resume")
    print(name, whole, broken)
    assert broken == whole
    assert distance(pictures, f"{name}-broken", f"{name}-whole") == 0


@pytest.mark.timeout(400)
def test_language_models_in_float32_are_the_same_under_every_engine(texts):
    losses = ("task.losses.alpha=0.7", "task.losses.features={weight: 0.5, student_blocks: [0], teacher_blocks: [2]}")
    reference = run(texts, "train", "reference", "single_gpu", *FLOAT32, *losses)
    found = {}
    for name, placement in {
        "ddp": "rank0",
        "zero2": "sharded",
        "zero3_offload": "streamed",
        "fsdp2": "balanced",
    }.items():
        ours = run(texts, "train", name, name, *FLOAT32, *losses, *OF_TWO, f"teacher.placement={placement}")
        found[name] = compare(texts, name, ours, reference)
    assert max(difference for difference, _ in found.values()) <= 2e-5
    assert max(students for _, students in found.values()) <= 1e-4


@pytest.mark.timeout(400)
def test_a_language_model_s_cache_in_bfloat16_is_its_teacher_bit_for_bit(texts):
    """The last hidden states."""
    live = run(texts, "train", "live", "single_gpu", *BFLOAT16)
    cache = (f"teacher.cache={texts / 'cached-states'}", "cache.form=hidden")
    run(texts, "cache", "caching", "single_gpu", *BFLOAT16, *cache)
    read = run(texts, "train", "cached", "single_gpu", *BFLOAT16, *cache, "teacher.placement=cached")
    print(live, read)
    assert read == live
    assert distance(texts, "cached", "live") == 0
