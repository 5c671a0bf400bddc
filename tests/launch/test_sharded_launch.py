"""A sharded teacher beside the student's engines: FSDP2 under DDP, an engine of its own under DeepSpeed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests import toys
from tests.launch.launching import CONFIGS, launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A Wan 2.2 toy: float32 islands, a bare parameter with one row a block, and two experts."""
    return toys.write_recipe(tmp_path_factory.mktemp("sharded"), num_experts=2)


@pytest.fixture(scope="module")
def replicated(toy) -> Path:
    result = launch(CONFIGS / "cpu.yaml", "train", str(toy / "recipe.yaml"), f"output_dir={toy / 'replicated'}")
    assert result.code == 0, result.stderr
    return toy / "replicated"


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("cpu_2proc", []),
        ("zero2", []),
        ("zero3_offload", ["teacher.offload=cpu"]),
    ],
)
def test_training_equals_that_of_a_replicated_teacher_in_one_process(toy, replicated, name, overrides):
    output_dir, cache_dir = toy / name, toy / f"{name}-cache"
    # Prompts need no teacher; it draws the rollout again, sharded, and is asked for the targets of training.
    shutil.copytree(toy / "cache", cache_dir, ignore=shutil.ignore_patterns("rollout*"))
    options = [f"output_dir={output_dir}", f"cache_dir={cache_dir}", "train.batch_size=4"]
    overrides = ["teacher.placement=sharded", *overrides]
    result = launch(CONFIGS / f"{name}.yaml", "train", str(toy / "recipe.yaml"), *options, *overrides)
    assert result.code == 0, result.stderr
    assert json.loads((output_dir / "summary.json").read_text())["world_size"] == 2
    toys.assert_same_run(output_dir, replicated)
