"""FSDP's launch files through `accelerate launch`, over gloo: the same numbers as one process, and a bitwise resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import toys
from tests.launch.launching import CONFIGS, LAUNCHER, ROOT, Result, launch, run

TWO = ["train.batch_size=2", "train.samples_per_update=8", "train.gradient_checkpointing=true"]
ALL = [
    "train.ema_decay=0.9",
    "task.losses.features.weight=0.1",
    "task.losses.features.student_blocks=[0]",
    "task.losses.features.teacher_blocks=[1]",
    *("data.held_out=0.2", "evaluation.every_steps=2", "evaluation.sample_every_steps=3"),
]


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    pipeline = toys.make_pipeline(folder / "pipeline")
    recipe = toys.recipe(folder, pipeline, optim={"lr": 1e-3, "max_grad_norm": 1.0, "weight_decay": 0.1})
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"cache_dir": str(folder / "cache")}))
    return folder


@pytest.fixture(scope="module")
def reference(toy) -> Path:
    """One process, with a moving average and projections, and evaluations while training."""
    result = train(toy, CONFIGS / "cpu.yaml", "reference", *ALL)
    assert result.code == 0, result.stderr
    return toy / "reference"


def train(toy: Path, config_file: Path, name: str, *overrides: str) -> Result:
    return launch(config_file, "train", str(toy / "recipe.yaml"), f"output_dir={toy / name}", *overrides)


def changed(toy: Path, name: str, changes: dict[str, Any], fsdp: dict[str, Any]) -> Path:
    content = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    file = toy / f"changed-{len(list(toy.glob('changed-*')))}.yaml"
    file.write_text(yaml.safe_dump(content | changes | {"fsdp_config": content["fsdp_config"] | fsdp}))
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("fsdp2", TWO),
        ("fsdp2_offload", ["train.batch_size=4", "teacher.placement=sharded"]),
        ("fsdp1", TWO),
        ("fsdp1_offload", ["train.batch_size=4", "teacher.placement=streamed"]),
    ],
)
def test_every_file_equals_one_process(toy, reference, name, overrides):
    result = train(toy, CONFIGS / f"{name}.yaml", name, *ALL, *overrides)
    assert result.code == 0, result.stderr
    summary = json.loads((toy / name / "summary.json").read_text())
    assert (summary["engine"], summary["world_size"]) == (name[:5], 2)
    toys.assert_same_run(toy / name, reference)
    assert "view tensor" not in result.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fsdp2", "fsdp1"])
def test_resuming_is_bitwise(toy, name):
    config, options = CONFIGS / f"{name}.yaml", ["train.batch_size=4"]
    assert train(toy, config, f"whole-{name}", *options).code == 0
    assert train(toy, config, f"broken-{name}", *options, "train.max_steps=3").code == 0
    result = train(toy, config, f"broken-{name}", *options, "--resume")
    assert result.code == 0, result.stderr
    toys.assert_same_run(toy / f"broken-{name}", toy / f"whole-{name}", loss_tolerance=0.0, tolerance=0.0)


@pytest.mark.thorough
def test_replicas_of_shards_from_the_default_file(toy, reference, tmp_path):
    """Without --config_file, where `accelerate config` writes; four ranks, two replicas of two shards each."""
    sizes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}
    changes = {"parallelism_config": sizes, "num_processes": 4}
    default = tmp_path / "accelerate" / "default_config.yaml"
    default.parent.mkdir()
    default.write_text(changed(toy, "fsdp2", changes, {}).read_text())
    arguments = ["-m", "distiller", "train", str(toy / "recipe.yaml"), f"output_dir={toy / 'replicas'}", *ALL]
    result = run([*LAUNCHER, *arguments, "train.batch_size=2"], 280, ROOT, {"HF_HOME": str(tmp_path)})
    assert result.code == 0, result.stderr
    assert json.loads((toy / "replicas" / "summary.json").read_text())["engine"] == "fsdp2"
    toys.assert_same_run(toy / "replicas", reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "fsdp", "words"),
    [
        ({"use_cpu": True}, {}, ["use_cpu", "drop FSDP"]),
        ({}, {"fsdp_transformer_layer_cls_to_wrap": "BertLayer"}, ["BertLayer", "WanTransformerBlock"]),
    ],
)
def test_what_cannot_work_is_one_line(toy, changes, fsdp, words):
    result = train(toy, changed(toy, "fsdp2", changes, fsdp), "refused", "train.batch_size=4")
    assert result.code != 0
    ours = [line for line in result.stderr.splitlines() if line.startswith("distiller: ")]
    assert len(ours) == 1
    assert all(word in ours[0] for word in words)
    assert not (toy / "refused").exists()
