"""ZeRO-3 on a local disk: trains and resumes where libaio is, and says in one line where it is not."""

from __future__ import annotations

import json

import pytest

from tests import toys
from tests.launch.launching import CONFIGS, Result, start

FLAGS = {"zero3_nvme": "--offload_param_nvme_path", "zero3_nvme_optimizer": "--offload_optimizer_nvme_path"}

pytestmark = pytest.mark.slow


def train(toy, name, disk, run_dir, *options) -> Result:
    launcher = ["--config_file", str(CONFIGS / f"{name}.yaml"), FLAGS[name], str(disk)]
    recipe = [str(toy / "recipe.yaml"), f"output_dir={run_dir}", "train.batch_size=4"]
    return start([*launcher, "-m", "distiller", "train", *recipe, *options], timeout_s=240)


def check_refusal(result: Result) -> None:
    ours = [line for line in result.stderr.splitlines() if line.startswith(("distiller:", "distiller,"))]
    assert len(ours) == 1, result.stderr
    assert ours[0].startswith("distiller: offload to nvme: DeepSpeed reads and writes with libaio, which is not")
    assert "use zero3_offload.yaml" in ours[0]


@pytest.mark.parametrize("name", FLAGS)
def test_the_shipped_files(toy, reference, tmp_path, name):
    """The same numbers as one process; a run in two parts is that run bit for bit; and nothing stays on the disk."""
    disk, whole, broken = tmp_path / "disk", tmp_path / "whole", tmp_path / "broken"
    disk.mkdir()
    result = train(toy, name, disk, whole)
    if result.code != 0:
        check_refusal(result)
        assert not whole.exists()
    else:
        assert json.loads((whole / "summary.json").read_text())["engine"] == "deepspeed-zero3-offload"
        toys.assert_same_run(whole, reference)
        for options in (["train.max_steps=4"], ["--resume"]):
            result = train(toy, name, disk, broken, *options)
            assert result.code == 0, result.stderr
        toys.assert_same_run(broken, whole, loss_tolerance=0.0, tolerance=0.0)
    assert list(disk.iterdir()) == []
