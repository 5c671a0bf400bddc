"""The built wheel carries recipes, assets and launch files, and trains from any folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.launch.launching import LAUNCHER, ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The wheel, unpacked in a folder of its own: on PYTHONPATH it comes before the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run(installed: Path, cwd: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    result = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_wheel_has_no_tests_and_all_data(installed):
    packages = {path.name for path in installed.iterdir()}
    assert packages == {"distiller", next(name for name in packages if name.endswith(".dist-info"))}
    for part in ("recipes/digits-wan.yaml", "assets/digits-wan/model_index.json", "assets/digits-prompts.txt",
                 "accelerate_configs/zero3_offload.yaml", "ds_configs/zero3_offload.json",
                 "report/page.css", "report/page.js"):  # fmt: skip
        assert (installed / "distiller" / part).is_file()


def test_it_trains_from_an_empty_folder(installed, tmp_path):
    where = run(installed, tmp_path, "-c", "import distiller; print(distiller.__file__)").strip()
    assert where.startswith(str(installed))
    assert "digits-wan" in run(installed, tmp_path, "-m", "distiller", "recipes")
    run(installed, tmp_path, "-m", "distiller", "configs", ".")
    launch = [*LAUNCHER[1:], "--config_file", "accelerate_configs/cpu_2proc.yaml"]
    overrides = ["train.max_steps=3", "data.max_samples=64", "sampling.num_inference_steps=2"]
    run(installed, tmp_path, *launch, "-m", "distiller", "train", "digits-wan", *overrides)
    summary = json.loads((tmp_path / "outputs" / "digits-wan" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert (tmp_path / "outputs" / "digits-wan" / "samples.png").is_file()
    assert (tmp_path / "outputs" / "digits-wan" / "report.html").is_file()
    (session,) = json.loads((tmp_path / "outputs" / "digits-wan" / "environment.json").read_text())
    assert (session["engine"], session["world_size"]) == ("ddp", 2)
