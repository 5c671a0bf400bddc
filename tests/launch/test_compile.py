"""A student that is compiled by the launch file or the recipe: the same numbers, and names without a wrapper."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open

from tests import toys
from tests.launch.launching import CONFIGS, launch

pytestmark = pytest.mark.slow


def names(file: Path) -> list[str]:
    with safe_open(file, "pt") as tensors:
        return sorted(tensors.keys())


@pytest.mark.parametrize("is_regional", [False, True])
def test_ddp_with_a_compiled_student_equals_one_process(toy, reference, tmp_path, is_regional):
    """aot_eager traces and partitions as inductor does, without its compiler."""
    dynamo = {"dynamo_backend": "AOT_EAGER", "dynamo_mode": "default", "dynamo_use_regional_compilation": is_regional}
    config = yaml.safe_load((CONFIGS / "cpu_2proc.yaml").read_text()) | {"dynamo_config": dynamo}
    (tmp_path / "compiled.yaml").write_text(yaml.safe_dump(config))
    arguments = ["train", str(toy / "recipe.yaml"), f"output_dir={tmp_path / 'run'}", "train.batch_size=4"]
    result = launch(tmp_path / "compiled.yaml", *arguments)
    assert result.code == 0, result.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["engine"] == "ddp"
    toys.assert_same_run(tmp_path / "run", reference)
    exported = "student/diffusion_pytorch_model.safetensors"
    assert names(tmp_path / "run" / exported) == names(reference / exported)
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file() and "checkpoints" in file.parts]
    assert any(file.suffix == ".safetensors" for file in files)
    assert [file for file in files if b"_orig_mod" in file.read_bytes()] == []


def test_ddp_with_blocks_that_the_recipe_compiles_equals_one_process(toy, reference, tmp_path):
    """By inductor, teacher and student."""
    options = ["train.compile=default", "teacher.compile=default", "train.batch_size=4"]
    arguments = ["train", str(toy / "recipe.yaml"), f"output_dir={tmp_path / 'run'}", *options]
    result = launch(CONFIGS / "cpu_2proc.yaml", *arguments, timeout_s=280)
    assert result.code == 0, result.stderr
    toys.assert_same_run(tmp_path / "run", reference)
    exported = "student/diffusion_pytorch_model.safetensors"
    assert names(tmp_path / "run" / exported) == names(reference / exported)
