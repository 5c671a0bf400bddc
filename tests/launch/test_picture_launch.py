"""Students of the picture families, launched: two ranks and a spread teacher train what one process trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests import toy_pictures, toys
from tests.launch.launching import CONFIGS, launch

FEATURES = {
    "sd3": {"weight": 0.1, "student_blocks": [0], "teacher_blocks": [2]},
    "sd": {"weight": 0.1, "student_blocks": [1], "teacher_blocks": [2]},
}


def train(folder: Path, name: str, config: str, *overrides: str) -> Path:
    run_dir = folder / name
    result = launch(CONFIGS / config, "train", str(folder / "recipe.yaml"), f"output_dir={run_dir}", *overrides)
    assert result.code == 0, result.stderr
    return run_dir


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Of each kind: recipe.yaml, six updates of 8 samples, and what one process makes of it in `reference`."""
    found = {}
    for kind in toy_pictures.KINDS:
        folder = tmp_path_factory.mktemp(kind)
        pipeline = toy_pictures.make(kind, folder / "pipeline")
        task = {"losses": {"features": FEATURES[kind]}}
        recipe = toy_pictures.recipe(kind, folder, pipeline, task=task, cache_dir=str(folder / "cache"))
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        train(folder, "reference", "cpu.yaml")
        found[kind] = folder
    return found


@pytest.mark.parametrize("kind", toy_pictures.KINDS)
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
def test_two_processes_train_one_s_student(folders, kind, config, engine):
    options = ["train.batch_size=2", "train.samples_per_update=8", "teacher.placement=balanced"]
    run_dir = train(folders[kind], engine, config, *options)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["engine"], summary["world_size"], summary["placement"]) == (engine, 2, "balanced")
    assert (run_dir / "samples.png").is_file()
    toys.assert_same_run(run_dir, folders[kind] / "reference")
