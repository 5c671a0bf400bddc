"""What a run on a GPU was predicted to take, beside what it took."""

from __future__ import annotations

import json

import pytest

from distiller.cli import main
from distiller.planner.account import WORKSPACE
from distiller.training.expectation import GIB
from tests import toys
from tests.gpu.ranks import NUM_GPUS

pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU")


@pytest.mark.parametrize("placement", ["auto", "replicated", "streamed", "cpu"])
def test_a_run_takes_no_more_than_was_predicted(tmp_path, placement, capsys):
    toys.write_recipe(tmp_path)
    options = [f"teacher.placement={placement}", f"output_dir={tmp_path / 'run'}", "train.max_steps=24"]
    assert main(["train", str(tmp_path / "recipe.yaml"), *options]) == 0
    printed = capsys.readouterr()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    # Libraries' workspaces are larger than the toy: what it takes beside them is predicted to a few MiB.
    assert summary["expected_gpu_peak_gib"] is not None
    assert summary["gpu_peak_gib"] <= summary["expected_gpu_peak_gib"] + 4 / 1024
    assert summary["expected_gpu_peak_gib"] * GIB < summary["gpu_peak_gib"] * GIB + WORKSPACE
    assert "update 20: GPU peak " in printed.err
    if placement == "auto":
        assert "teacher.placement auto: replicated (a whole teacher, the student and an update take " in printed.out
