"""Students of the picture families, launched: two ranks and a spread teacher train what one process trains."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from tests import toy_pictures, toys
from tests.launch.launching import CONFIGS, ROOT, Result, free_port, launch, start

# Fast tests of its parts: tests/launch/test_launch_files.py (two launched ranks), tests/distributed/test_spread.py (a
# teacher over two ranks), tests/unit/test_picture_training.py (losses and samples of these families).
pytestmark = pytest.mark.slow

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
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    """Kind -> recipe.yaml, six updates of 8 samples, and what one process makes of it in `reference`."""

    @functools.cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        pipeline = toy_pictures.make(kind, folder / "pipeline")
        task = {"losses": {"features": FEATURES[kind]}}
        recipe = toy_pictures.recipe(kind, folder, pipeline, task=task, cache_dir=str(folder / "cache"))
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        train(folder, "reference", "cpu.yaml")
        return folder

    return make


@pytest.mark.parametrize("kind", ["sd3", "sd"])
@pytest.mark.parametrize(
    ("config", "engine"),
    [
        ("cpu_2proc.yaml", "ddp"),
        ("fsdp2.yaml", "fsdp2"),
        ("fsdp1.yaml", "fsdp1"),
        ("zero2.yaml", "deepspeed-zero2"),
        ("zero3.yaml", "deepspeed-zero3"),
    ],
)
def test_two_processes_train_one_s_student(folder_of, kind, config, engine):
    options = ["train.batch_size=2", "train.samples_per_update=8", "teacher.placement=balanced"]
    run_dir = train(folder_of(kind), engine, config, *options)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["engine"], summary["world_size"], summary["placement"]) == (engine, 2, "balanced")
    assert (run_dir / "samples.png").is_file()
    toys.assert_same_run(run_dir, folder_of(kind) / "reference")


def test_two_runs_at_once_draw_one_rollout(folder_of, tmp_path):
    """Of two ranks each: neither destroys the other's shards, and both train on the same."""
    folder, options = folder_of("sd"), ["train.batch_size=2", "train.samples_per_update=8"]

    def train_beside(name: str) -> Result:
        port = ["--config_file", str(CONFIGS / "cpu_2proc.yaml"), "--main_process_port", str(free_port())]
        overrides = [f"output_dir={tmp_path / name}", f"cache_dir={tmp_path / 'cache'}", *options]
        return start([*port, "-m", "distiller", "train", str(folder / "recipe.yaml"), *overrides], 400, ROOT)

    with ThreadPoolExecutor() as pool:
        results = list(pool.map(train_beside, ("a", "b")))
    assert [result.code for result in results] == [0, 0], [result.stderr for result in results]
    assert sum("shards to draw" in result.stdout for result in results) == 1
    assert sum("rollout: reusing" in result.stdout for result in results) == 1
    for name in ("a", "b"):
        toys.assert_same_run(tmp_path / name, folder / "reference")
