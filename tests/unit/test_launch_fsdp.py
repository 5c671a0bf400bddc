"""FSDP's part of a launch file: what `accelerate config` writes is read, what cannot work is refused in one line."""

from __future__ import annotations

import argparse
import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config import config
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.menu import BulletMenu
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, ShardingStrategy

from distiller.config.loading import parse
from distiller.errors import UserError
from distiller.launch.compile import check_compile
from distiller.launch.deepspeed import Offload
from distiller.launch.fsdp import fsdp_of_file, fsdp_plugin, launched_fsdp, parse_fsdp, wrapped_classes
from distiller.launch.student_layout import StudentLayout
from distiller.training.student_memory import student_state
from tests import toys
from tests.launch.launching import CONFIGS

BLOCKS = ("WanTransformerBlock",)


def questionnaire(monkeypatch, target: Path, choices: dict[str, str], answers: dict[str, str]) -> Path:
    """What `accelerate config` writes for these menu choices and typed answers; its defaults for the rest."""

    def choose(menu: BulletMenu, default_choice: int = 0) -> int:
        wanted = next((value for key, value in choices.items() if key in menu.prompt), None)
        return default_choice if wanted is None else [str(choice) for choice in menu.choices].index(wanted)

    def answer(prompt: str = "") -> str:
        return next((value for key, value in answers.items() if key in prompt), "")

    monkeypatch.setattr(BulletMenu, "run", choose)
    monkeypatch.setattr(builtins, "input", answer)
    config.config_command(argparse.Namespace(config_file=str(target)))
    return target


MACHINE = {"In which compute environment": "This machine", "Which type of machine": "multi-GPU"}
USES = {"FullyShardedDataParallel": "yes", "How many GPU(s)": "2"}


@pytest.mark.parametrize(
    ("choices", "answers", "expected"),
    [
        (
            {"auto wrap policy": "TRANSFORMER_BASED_WRAP", "FSDP version": "2"},
            {"`_no_split_modules`": "yes"},
            {"version": 2, "strategy": "FULL_SHARD", "policy": "TRANSFORMER_BASED_WRAP", "class_names": ()},
        ),
        (
            {"auto wrap policy": "TRANSFORMER_BASED_WRAP", "FSDP version": "2"},
            {"class names": "WanTransformerBlock", "resharding": "no", "offload parameters": "yes"},
            {"strategy": "SHARD_GRAD_OP", "class_names": ("WanTransformerBlock",), "offloads": True},
        ),
        (
            {"auto wrap policy": "SIZE_BASED_WRAP", "FSDP version": "2"},
            {"activation checkpointing": "yes"},
            {"policy": "SIZE_BASED_WRAP", "min_num_params": 100_000_000, "recomputes": True},
        ),
        (
            {"auto wrap policy": "NO_WRAP", "FSDP version": "1", "sharding strategy": "SHARD_GRAD_OP"},
            {},
            {"version": 1, "strategy": "SHARD_GRAD_OP", "policy": "NO_WRAP", "uses_flat": False},
        ),
        (
            {"auto wrap policy": "SIZE_BASED_WRAP", "FSDP version": "1", "sharding strategy": "HYBRID_SHARD"},
            {"use_orig_params": "no", "minimum number": "1000000", "CPU RAM": "no"},
            {"strategy": "HYBRID_SHARD", "min_num_params": 1_000_000, "uses_flat": True, "loads_on_one_rank": False},
        ),
    ],
)
def test_what_accelerate_config_writes_is_read(tmp_path, monkeypatch, choices, answers, expected):
    file = questionnaire(monkeypatch, tmp_path / "mine.yaml", MACHINE | choices, USES | answers)
    found = fsdp_of_file(file, 2)
    assert found is not None
    assert {name: getattr(found, name) for name in expected} == expected


def test_the_launcher_s_environment_says_the_same_as_the_file(tmp_path, monkeypatch):
    """FSDP1's answer is in one variable, and Accelerate obeys another one that always says FULL_SHARD."""
    choices = {"auto wrap policy": "TRANSFORMER_BASED_WRAP", "FSDP version": "1", "sharding strategy": "SHARD_GRAD_OP"}
    file = questionnaire(monkeypatch, tmp_path / "mine.yaml", MACHINE | choices, USES | {"class names": BLOCKS[0]})
    environment = environment_of(file)
    assert environment["FSDP_SHARDING_STRATEGY"] == "FULL_SHARD"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launched_fsdp(True, 2, []) == fsdp_of_file(file, 2)


def environment_of(file: Path) -> dict[str, str]:
    """The variables that `accelerate launch` sets for FSDP."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    args, *_ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(file), "--main_process_port", "0", "train.py"])
    )
    found = prepare_multi_gpu_env(args)
    return {name: value for name, value in found.items() if "FSDP" in name or "PARALLELISM" in name}


@pytest.mark.parametrize("name", ["fsdp1", "fsdp1_offload", "fsdp2", "fsdp2_offload"])
def test_shipped_files_are_what_their_names_say(name):
    found = fsdp_of_file(CONFIGS / f"{name}.yaml", 2)
    assert found is not None
    assert (found.engine, found.offloads) == (name[:5], name.endswith("offload"))
    assert (found.strategy, found.policy, found.class_names) == ("FULL_SHARD", "TRANSFORMER_BASED_WRAP", ())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"VERSION": "3"}, ["fsdp_version is 3", "1 or 2"]),
        ({"VERSION": "2", "RESHARD_AFTER_FORWARD": "full_shard"}, ["full_shard", "true or false"]),
        ({"RESHARD_AFTER_FORWARD": "HALF_SHARD"}, ["HALF_SHARD", "choose one of FULL_SHARD"]),
        ({"RESHARD_AFTER_FORWARD": "NO_SHARD", "SHARDING_STRATEGY": "2"}, ["SHARD_GRAD_OP", "NO_SHARD", "remove one"]),
        ({"AUTO_WRAP_POLICY": "SOME_WRAP"}, ["SOME_WRAP", "choose one of"]),
        ({"MIN_NUM_PARAMS": "many"}, ["fsdp_min_num_params is 'many'", "digits"]),
        ({"BACKWARD_PREFETCH": "some"}, ["fsdp_backward_prefetch is 'SOME'", "'BACKWARD_PRE'"]),
        ({"FORWARD_PREFETCH": "perhaps"}, ["fsdp_forward_prefetch is perhaps", "true or false"]),
        ({"OFFLOAD_PARAMS": "perhaps"}, ["fsdp_offload_params is perhaps", "true or false"]),
        ({"IGNORED_MODULES": "head.*"}, ["fsdp_ignored_modules", "gradients", "remove it"]),
        ({"ACTIVATION_CHECKPOINTING_OFFLOAD": "true"}, ["fsdp_activation_checkpointing_offload", "remove it"]),
    ],
)
def test_what_cannot_work_is_refused(values, words):
    with pytest.raises(UserError) as error:
        parse_fsdp(values)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp": 2}, ["tp_size is 2", "tensor parallelism"]),
        ({"cp": 2}, ["cp_size is 2", "context parallelism"]),
        ({"dp_shard": 4}, ["is 4 and the run has 2 processes"]),
        ({"dp_replicate": 2}, ["shard nothing", "ddp.yaml"]),
    ],
)
def test_parallelism_that_is_not_ours_is_refused(tmp_path, sizes, words):
    file = changed(tmp_path, parallelism_config={f"parallelism_config_{name}_size": n for name, n in sizes.items()})
    with pytest.raises(UserError) as error:
        fsdp_of_file(file, 2)
    assert all(word in str(error.value) for word in words)


def test_replicas_of_shards_are_accepted(tmp_path):
    sizes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}
    assert fsdp_of_file(changed(tmp_path, parallelism_config=sizes), 4) is not None


def changed(tmp_path: Path, **changes: Any) -> Path:
    content = yaml.safe_load((CONFIGS / "fsdp2.yaml").read_text()) | changes
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "changed.yaml"


@pytest.mark.parametrize(
    ("why", "strategy", "num_processes"),
    [
        ("NO_SHARD", "no_shard", "2"),
        ("one process has", "full_shard", "1"),
        ("HYBRID_SHARD with one process a machine", "hybrid_shard", "2"),
    ],
)
def test_where_fsdp1_shards_nothing_it_is_left_out_and_said(monkeypatch, why, strategy, num_processes):
    launched(monkeypatch, RESHARD_AFTER_FORWARD=strategy)
    monkeypatch.setenv("WORLD_SIZE", num_processes)
    notices: list[str] = []
    assert launched_fsdp(True, 1, notices) is None
    assert why in notices[0]
    launched(monkeypatch, OFFLOAD_PARAMS="true")
    with pytest.raises(UserError, match="nothing would be offloaded"):
        launched_fsdp(True, 1, [])


def test_hybrid_sharding_on_one_machine_is_what_it_amounts_to(monkeypatch):
    launched(monkeypatch, RESHARD_AFTER_FORWARD="hybrid_shard_zero2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    notices: list[str] = []
    found = launched_fsdp(True, 4, notices)
    assert found is not None
    assert found.strategy == "SHARD_GRAD_OP"
    assert "HYBRID_SHARD_ZERO2 on one machine is SHARD_GRAD_OP" in notices
    with pytest.raises(UserError, match="one process for each of a machine's GPUs"):
        launched_fsdp(True, 2, [])


def launched(monkeypatch, **values: str) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for name, value in values.items():
        monkeypatch.setenv(f"FSDP_{name}", value)


def student() -> nn.Module:
    return nn.ModuleDict({"model": toys.transformer(num_layers=2)})


def test_blocks_are_units_where_no_class_is_named():
    assert wrapped_classes(parse_fsdp({"AUTO_WRAP_POLICY": "transformer_based_wrap"}), student(), BLOCKS) == BLOCKS


def test_named_classes_are_the_student_s():
    values = {"AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "TRANSFORMER_CLS_TO_WRAP": "WanAttention, BertLayer"}
    with pytest.raises(UserError, match=r"names BertLayer, which the student does not have.*WanTransformerBlock"):
        wrapped_classes(parse_fsdp(values), student(), BLOCKS)


def test_lists_of_modules_are_no_units():
    values = {"AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "MIN_NUM_PARAMS": "4000"}
    found = wrapped_classes(parse_fsdp(values), student(), BLOCKS)
    assert found == ("WanTimeTextImageEmbedding", "WanTransformer3DModel", "WanTransformerBlock")
    assert wrapped_classes(parse_fsdp(values | {"MIN_NUM_PARAMS": "1e8"}), student(), BLOCKS) == ()


def test_fsdp2_cannot_shard_a_number():
    module = nn.Linear(2, 2)
    module.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(UserError, match="without dimensions"):
        wrapped_classes(parse_fsdp({"VERSION": "2"}), module, ())


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped")
def test_settings_reach_accelerate_s_plugin(monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    older = fsdp_plugin(
        parse_fsdp({"RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP", "OFFLOAD_PARAMS": "true"}), (), "bf16", False, []
    )
    assert older.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert older.use_orig_params
    assert older.cpu_offload == CPUOffload(offload_params=True)
    assert not older.mixed_precision_policy.cast_root_forward_inputs
    newer = fsdp_plugin(parse_fsdp({"VERSION": "2", "OFFLOAD_PARAMS": "true"}), ("Linear",), "bf16", False, [])
    assert newer.reshard_after_forward is True
    assert newer.transformer_cls_names_to_wrap == ["Linear"]
    assert isinstance(newer.cpu_offload, CPUOffloadPolicy)
    policy = newer.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert not policy.cast_forward_inputs


def test_one_unit_over_several_machines_has_a_rule_that_no_module_meets():
    """Without a rule torch makes no groups of machines; what torch does with ours needs GPUs."""
    hybrid = parse_fsdp({"AUTO_WRAP_POLICY": "NO_WRAP", "RESHARD_AFTER_FORWARD": "HYBRID_SHARD"})
    module = student()
    plugin = fsdp_plugin(hybrid, wrapped_classes(hybrid, module, BLOCKS), "no", False, [])
    plugin.set_auto_wrap_policy(module)
    assert plugin.sharding_strategy is ShardingStrategy.HYBRID_SHARD
    sizes = [sum(parameter.numel() for parameter in each.parameters()) for each in module.modules()]
    assert not any(plugin.auto_wrap_policy(module, recurse=False, nonwrapped_numel=size) for size in sizes)


@pytest.mark.parametrize("average", [0, 4])
def test_the_student_s_reservation_follows_the_shards(tmp_path, average):
    recipe = parse(toys.recipe(tmp_path, tmp_path, train={"ema_decay": 0.9} if average else {}))

    def size(accumulation_steps: int = 1, **settings: str) -> tuple[int, int]:
        fsdp = parse_fsdp({"VERSION": "2", **settings})
        state = student_state(100, recipe, StudentLayout("fsdp2", 4, accumulation_steps, "no", Offload(), fsdp))
        return state.gpu, state.host

    held, snapshot = 100 * (16 + average) // 4, 100 * (12 + average) // 4
    assert size() == (held, snapshot)
    assert size(RESHARD_AFTER_FORWARD="false") == (held + 400, snapshot)
    assert size(OFFLOAD_PARAMS="true") == (0, held + snapshot)
    assert size(accumulation_steps=2) == (held + 400, snapshot)


def test_the_default_file_is_looked_for_where_accelerate_writes_it():
    assert default_config_file.endswith("accelerate/default_config.yaml")


def test_a_loss_scale_and_offload_do_not_go_together():
    offloaded = parse_fsdp({"VERSION": "2", "OFFLOAD_PARAMS": "true"})
    with pytest.raises(UserError, match=r"fsdp_offload_params is true and train.mixed_precision is fp16"):
        fsdp_plugin(offloaded, ("Linear",), "fp16", False, [])


def test_compilation_is_refused_with_the_older_fsdp_alone(tmp_path):
    recipe = parse(toys.recipe(tmp_path, tmp_path, train={"max_steps": 1, "compile": "default"}))
    check_compile(recipe, {}, "fsdp2")
    with pytest.raises(UserError, match="not supported with FSDP1"):
        check_compile(recipe, {}, "fsdp1")
    contradicting = {"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune"}
    with pytest.raises(UserError, match=r"train.compile is default and the launch file says max-autotune"):
        check_compile(recipe, contradicting)
