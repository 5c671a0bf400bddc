"""Launch files: what `accelerate config` writes is read, and what is not run is refused in one line."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from distiller.errors import UserError
from distiller.launch import World
from distiller.launch_deepspeed import Offload
from distiller.launch_request import deepspeed_settings, read_launch_file
from distiller.launch_rules import check_nvme_room, check_request, check_zero, fill_nvme_paths
from distiller.recipe_file import parse
from distiller.student_size import gpu_bytes, host_bytes
from tests import toys
from tests.questionnaire import DEEPSPEED, MULTI_GPU, QUESTIONNAIRES, answer

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
DEEPSPEED_FILE = yaml.safe_load((ROOT / "accelerate_configs" / "zero2.yaml").read_text())


def written(folder: Path, **changes) -> Path:
    file = folder / "launch.yaml"
    content = {key: value for key, value in (DEEPSPEED_FILE | changes).items() if value is not None}
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("file", [file for file in SHIPPED if "nvme" not in file.name], ids=lambda file: file.stem)
def test_shipped_files_pass(file):
    check_request(read_launch_file(file))


def test_the_nvme_file_asks_for_its_folder(tmp_path):
    request = read_launch_file(ROOT / "accelerate_configs" / "zero3_nvme.yaml")
    with pytest.raises(UserError, match="needs a folder on a local disk: pass --offload_optimizer_nvme_path"):
        check_request(request)
    zero = deepspeed_settings(request)["zero_optimization"]
    fill_nvme_paths(zero, {"offload_param_nvme_path": str(tmp_path)})
    assert [zero[part]["nvme_path"] for part in ("offload_optimizer", "offload_param")] == [str(tmp_path)] * 2
    check_zero(zero)


@pytest.mark.parametrize("name", QUESTIONNAIRES)
def test_questionnaires_pass(monkeypatch, tmp_path, name):
    request = read_launch_file(answer(monkeypatch, tmp_path / "default_config.yaml", QUESTIONNAIRES[name]))
    check_request(request)
    assert request.num_processes == (1 if name == "single" else 2)


def test_a_questionnaires_nvme_folder_is_not_lost(monkeypatch, tmp_path):
    answers = DEEPSPEED | {
        "ZeRO optimization stage": "3",
        "Where to offload optimizer": "nvme",
        "Nvme Path to offload optimizer": str(tmp_path),
    }
    request = read_launch_file(answer(monkeypatch, tmp_path / "launch.yaml", answers))
    check_request(request)
    assert deepspeed_settings(request)["zero_optimization"]["offload_optimizer"]["nvme_path"] == str(tmp_path)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (MULTI_GPU | {"Megatron-LM": "yes"}, ["MEGATRON_LM is not supported"]),
        ({"Which type of machine": "TPU"}, ["XLA is not supported"]),
        ({"Which type of machine": "multi-CPU", "How many processes": "2"}, ["MULTI_CPU starts one", "cpu_2proc"]),
        (DEEPSPEED | {"ZeRO optimization stage": "0"}, ["without ZeRO", "ddp.yaml"]),
        (
            DEEPSPEED | {"ZeRO optimization stage": "2", "Where to offload optimizer": "nvme"},
            ["offload_optimizer to nvme under ZeRO-2", "zero3_nvme.yaml"],
        ),
        (
            DEEPSPEED | {"ZeRO optimization stage": "3", "Where to offload parameters": "nvme"},
            ["offload_param_nvme_path: /nvme is not a folder"],
        ),
        (DEEPSPEED | {"Mixture-of-Experts": "yes", "MoE layer class": "Block"}, ["deepspeed_moe_layer_cls_names"]),
    ],
)
def test_questionnaires_that_are_refused(monkeypatch, tmp_path, answers, words):
    request = read_launch_file(answer(monkeypatch, tmp_path / "launch.yaml", answers))
    with pytest.raises(UserError) as refusal:
        check_request(request)
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mixed_precision": "bf16"}, ["mixed_precision beside deepspeed_config_file", "recipe's"]),
        ({"num_machines": 2, "num_processes": 3}, ["3 processes", "2 machines evenly"]),
        (
            {"num_machines": 2, "deepspeed_config": {"zero_stage": 2}},
            ["multinode_launcher pdsh is not supported", "standard"],
        ),
        ({"parallelism_config": {"parallelism_config_tp_size": 2}}, ["parallelism_config is not supported"]),
    ],
)
def test_files_that_are_refused(tmp_path, changes, words):
    with pytest.raises(UserError) as refusal:
        check_request(read_launch_file(written(tmp_path, **changes)))
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written to"):
        check_zero({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}})


def test_a_disk_that_is_too_small(tmp_path):
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    check_nvme_room(zero, num_parameters=1000, local_share=0.5)
    with pytest.raises(UserError, match="give a folder on a larger disk"):
        check_nvme_room(zero, num_parameters=10**15, local_share=0.5)


@pytest.mark.parametrize(
    ("offload", "on_gpu", "on_host"),
    [
        (Offload(), 16 + 4, 0),
        (Offload("cpu"), 4, 16 + 4),
        (Offload("cpu", "cpu"), 0, 20 + 4),
        (Offload("nvme", "nvme"), 0, 4),
        (Offload("none", "cpu"), 16 + 4, 4),
    ],
)
def test_what_an_offloaded_student_takes(tmp_path, offload, on_gpu, on_host):
    """Of two ranks, with a moving average; a checkpoint's copy has weights, moments and average of half of it."""
    averaged = parse(toys.recipe(tmp_path, tmp_path, train={"ema_decay": 0.9}))
    ranks = cast(Any, SimpleNamespace(num_processes=2))
    world = World(ranks, "deepspeed-zero3" + "-offload" * offload.is_any, "no", 1, offload, None, ())
    assert gpu_bytes(1000, averaged, world) == 1000 * on_gpu // 2
    assert host_bytes(1000, averaged, world) == 1000 * (on_host + 16) // 2


def test_every_launch_file_has_its_row():
    text = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    assert [file.name for file in SHIPPED if f"`{file.name}`" not in text] == []
