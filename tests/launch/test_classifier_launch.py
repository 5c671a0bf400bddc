"""A classifier's student, launched: the same run as one process's, running statistics included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from distiller.cli import main
from tests import classifiers, toys
from tests.launch.launching import CONFIGS, launch

FEATURES = {"weight": 0.1, "student_blocks": [1], "teacher_blocks": [3]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """recipe.yaml: six updates of 8 pictures, a ResNet's features matched."""
    folder = tmp_path_factory.mktemp("classifiers")
    teacher = classifiers.save_classifier(folder / "teacher", classifiers.resnet_config())
    pictures = classifiers.save_pictures(folder / "pictures")
    recipe = classifiers.recipe(
        folder,
        teacher,
        pictures,
        classifiers.resnet_config(depths=[1, 1]),
        task={"losses": {"features": FEATURES}},
        data={"augmentation": "crop-flip"},
    )
    recipe["student"]["batch_norm"] = "group"
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def train(folder: Path, name: str, config: str, *overrides: str) -> Path:
    run_dir = folder / name
    result = launch(CONFIGS / config, "train", str(folder / "recipe.yaml"), f"output_dir={run_dir}", *overrides)
    assert result.code == 0, result.stderr
    return run_dir


@pytest.fixture(scope="module")
def reference(folder) -> Path:
    """One process: this one, which has imported everything."""
    assert main(["train", str(folder / "recipe.yaml"), f"output_dir={folder / 'reference'}"]) == 0
    return folder / "reference"


def distance(one: Path, other: Path) -> float:
    ours, theirs = classifiers.student_vector(one), classifiers.student_vector(other)
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize(
    ("config", "engine"),
    [
        ("cpu_2proc.yaml", "ddp"),
        pytest.param("fsdp2.yaml", "fsdp2", marks=pytest.mark.slow),
        pytest.param("fsdp1.yaml", "fsdp1", marks=pytest.mark.slow),
        pytest.param("zero2.yaml", "deepspeed-zero2", marks=pytest.mark.slow),
        pytest.param("zero3.yaml", "deepspeed-zero3", marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_one_s_student(folder, reference, config, engine):
    run_dir = train(folder, engine, config, "train.batch_size=2", "train.samples_per_update=8")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["engine"], summary["world_size"]) == (engine, 2)
    ours, theirs = ([line["loss"] for line in toys.read_metrics(place)] for place in (run_dir, reference))
    assert ours == pytest.approx(theirs, abs=2e-5)
    assert distance(run_dir, reference) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("config", ["cpu_2proc.yaml", "zero2.yaml", "zero3.yaml", "fsdp2.yaml"])
def test_running_statistics_are_resumed(folder, config):
    """They differ from rank to rank; a checkpoint and the student have rank 0's."""
    name = config.removesuffix(".yaml")
    options = ["student.batch_norm=batch", "train.batch_size=4", "train.ema_decay=0.9", "train.num_epochs=null"]
    whole = train(folder, f"{name}-whole", config, *options)
    broken = train(folder, f"{name}-broken", config, *options, "train.max_steps=3")
    # A finished run of three updates goes on to six.
    result = launch(
        CONFIGS / config, "train", str(folder / "recipe.yaml"), f"output_dir={broken}", *options, "--resume"
    )
    assert result.code == 0, result.stderr
    assert torch.equal(classifiers.student_vector(broken), classifiers.student_vector(whole))
