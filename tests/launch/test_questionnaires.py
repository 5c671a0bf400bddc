"""What `accelerate config` writes, launched: as a file, and as the default file that nobody names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests import toys
from tests.launch.launching import LAUNCHER, ROOT, Result, run
from tests.questionnaire import MULTI_GPU, QUESTIONNAIRES, answer

OVERRIDES = ["train.batch_size=2", "train.samples_per_update=8"]
"""Two micro-batches an update, where the questionnaire's own default is one and the answers below say four."""


def train(toy: Path, output_dir: Path, *launcher: str, **environment: str) -> Result:
    command = [*LAUNCHER, *launcher, "-m", "distiller", "train", str(toy / "recipe.yaml"), *OVERRIDES]
    # Its own cache: the teacher's stages run under the engine too.
    places = [f"output_dir={output_dir}", f"cache_dir={output_dir}-cache"]
    return run([*command, *places], 240, ROOT, environment)


def check(result: Result, output_dir: Path, reference: Path, engine: str) -> None:
    assert result.code == 0, result.stderr
    summary = json.loads((output_dir / "summary.json").read_text())
    assert (summary["engine"], summary["world_size"]) == (engine, 2)
    toys.assert_same_run(output_dir, reference)


@pytest.mark.parametrize(
    ("variable", "below"),
    [
        ("HF_HOME", "accelerate"),
        pytest.param("XDG_CACHE_HOME", "huggingface/accelerate", marks=pytest.mark.slow),
    ],
)
def test_the_default_file_is_used_where_none_is_named(monkeypatch, toy, reference, tmp_path, variable, below):
    (tmp_path / below).mkdir(parents=True)
    answer(monkeypatch, tmp_path / below / "default_config.yaml", MULTI_GPU)
    monkeypatch.delenv("HF_HOME", raising=False)
    result = train(toy, tmp_path / "run", **{variable: os.fspath(tmp_path)})
    check(result, tmp_path / "run", reference, "ddp")
    assert result.stdout.count("default_config.yaml: no GPU found, running on the CPU") == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "engine"), [("zero2-offload", "deepspeed-zero2-offload"), ("fsdp2", "fsdp2"), ("fsdp1", "fsdp1")]
)
def test_a_file_of_the_questionnaire_s_trains(monkeypatch, toy, reference, tmp_path, name, engine):
    file = answer(monkeypatch, tmp_path / "mine.yaml", QUESTIONNAIRES[name])
    result = train(toy, tmp_path / "run", "--config_file", str(file))
    check(result, tmp_path / "run", reference, engine)


@pytest.mark.slow
def test_zero3_with_answers_that_are_not_the_recipe_s(monkeypatch, toy, reference, tmp_path):
    """Accumulation 4, clipping at 0.5 and zero.Init: the recipe's numbers, a whole student, and one notice of each."""
    file = answer(monkeypatch, tmp_path / "mine.yaml", QUESTIONNAIRES["zero3-offload"])
    assert "zero3_init_flag: true" in file.read_text()
    result = train(toy, tmp_path / "run", "--config_file", str(file))
    check(result, tmp_path / "run", reference, "deepspeed-zero3-offload")
    printed = result.stdout + result.stderr
    assert printed.count("DeepSpeed's gradient_accumulation_steps 4 is replaced by the recipe's 2") == 1
    assert printed.count("DeepSpeed's gradient_clipping 0.5 is replaced by the recipe's 1.0") == 1
