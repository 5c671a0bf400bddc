"""Task causal_lm through `accelerate launch`: rows of unequal length on two ranks, and one process's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from distiller.cli import main
from tests import toy_causal_lm
from tests.launch.launching import CONFIGS, launch

LOSSES = ["task.losses.alpha=0.7", "task.losses.features={weight: 0.5, student_blocks: [0], teacher_blocks: [2]}"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A teacher with tied weights."""
    return toy_causal_lm.write_recipe(tmp_path_factory.mktemp("language"))


@pytest.fixture(scope="module")
def reference(toy) -> Path:
    """One process: this one, which has imported everything."""
    assert main(["train", str(toy / "recipe.yaml"), f"output_dir={toy / 'one'}", *LOSSES]) == 0
    return toy / "one"


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        # Rows of another padded length on each rank meet on the one that holds the teacher.
        ("cpu_2proc", ["teacher.placement=rank0", "train.num_workers=1"]),
        pytest.param("zero2", ["teacher.placement=sharded"], marks=pytest.mark.slow),
        pytest.param("zero3_offload", ["train.gradient_checkpointing=true"], marks=pytest.mark.slow),
        pytest.param("fsdp2", ["teacher.placement=streamed"], marks=pytest.mark.slow),
        pytest.param("fsdp1", [], marks=pytest.mark.thorough),
    ],
)
def test_two_ranks_train_the_student_of_one_process(toy, reference, name, overrides):
    output_dir = toy / name
    options = [f"output_dir={output_dir}", "train.batch_size=2", "train.samples_per_update=8", *LOSSES, *overrides]
    result = launch(CONFIGS / f"{name}.yaml", "train", str(toy / "recipe.yaml"), *options)
    assert result.code == 0, result.stderr
    toy_causal_lm.assert_same_run(output_dir, reference)
    ours, theirs = (toy_causal_lm.sample_lines(folder) for folder in (output_dir, reference))
    assert ours == theirs
