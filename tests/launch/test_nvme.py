"""ZeRO-3 on a local disk: trains where libaio is, and says in one line where it is not."""

from __future__ import annotations

import json

import pytest

from tests import toys
from tests.launch.launching import CONFIGS, start

pytestmark = pytest.mark.slow


def test_the_shipped_file(toy, reference, tmp_path):
    folder, run_dir = tmp_path / "disk", tmp_path / "run"
    folder.mkdir()
    launcher = ["--config_file", str(CONFIGS / "zero3_nvme.yaml"), "--offload_param_nvme_path", str(folder)]
    command = ["-m", "distiller", "train", str(toy / "recipe.yaml"), f"output_dir={run_dir}", "train.batch_size=4"]
    result = start([*launcher, *command], timeout_s=240)
    if result.code != 0:
        ours = [line for line in result.stderr.splitlines() if line.startswith("distiller")]
        assert len(ours) == 1, result.stderr
        assert ours[0].startswith("distiller: offload to nvme: DeepSpeed reads and writes with libaio, which is not")
        assert "use zero3_offload.yaml" in ours[0]
        assert not run_dir.exists()
    else:
        assert json.loads((run_dir / "summary.json").read_text())["engine"] == "deepspeed-zero3-offload"
        toys.assert_same_run(run_dir, reference)
    assert list(folder.iterdir()) == []
