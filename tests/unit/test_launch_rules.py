"""Launch files: what `accelerate config` writes is read, and what is not run is refused in one line."""

import ast
import dataclasses
import json
import os
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.commands.to_fsdp2 import ARGUMENT_KEY_MAPPING

import distiller
from distiller.commands import check
from distiller.config.loading import parse
from distiller.errors import UserError
from distiller.launch.checks import (
    Launch,
    check_json_precision,
    check_launch,
    check_nvme_room,
    check_request,
    check_zero,
    fill_nvme_paths,
    possible_precisions,
)
from distiller.launch.deepspeed import Offload
from distiller.launch.fsdp import parse_fsdp
from distiller.launch.keys import reject_unknown_keys
from distiller.launch.request import LaunchRequest, deepspeed_settings, read_launch_file
from distiller.launch.student_layout import StudentLayout
from distiller.training.student_memory import student_state
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


@pytest.mark.parametrize(
    ("name", "parts"),
    [("zero3_nvme", ("offload_optimizer", "offload_param")), ("zero3_nvme_optimizer", ("offload_optimizer",))],
)
def test_the_nvme_files_ask_for_their_folder(tmp_path, name, parts):
    """One flag is enough, whichever it is."""
    request = read_launch_file(ROOT / "accelerate_configs" / f"{name}.yaml")
    with pytest.raises(UserError, match="needs a folder on a local disk: pass --offload_optimizer_nvme_path"):
        check_request(request)
    zero = deepspeed_settings(request)["zero_optimization"]
    fill_nvme_paths(zero, {"offload_param_nvme_path": str(tmp_path)})
    assert {part: zero[part]["nvme_path"] for part in zero if part.startswith("offload")} == dict.fromkeys(
        parts, str(tmp_path)
    )
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
        ({"deepspeed_config": {"zero_stage": "two"}}, ["zero_stage is 'two'", "not a whole number"]),
        ({"deepspeed_config": {"zero_stage": True}}, ["zero_stage is true", "not a whole number"]),
        ({"deepspeed_config": {"gradient_clipping": "some"}}, ["gradient_clipping is 'some'", "not a number"]),
        ({"deepspeed_config": {"gradient_accumulation_steps": [2]}}, ["gradient_accumulation_steps is [2]"]),
        ({"deepspeed_config": {"offload_optimizer_device": "gpu"}}, ["offload_optimizer_device is 'gpu'", "'nvme'"]),
        ({"num_processes": "two"}, ["num_processes is 'two'", "not a whole number"]),
        ({"num_machines": "one"}, ["num_machines is 'one'", "not a whole number"]),
        ({"num_machines": 0}, ["num_machines is 0", "at least 1"]),
        ({"machine_rank": "first"}, ["machine_rank is 'first'", "not a whole number"]),
        ({"main_process_port": 29500.5}, ["main_process_port is 29500.5", "not a whole number"]),
        ({"gpu_ids": 0}, ["gpu_ids is 0", "quotes"]),
        ({"use_cpu": "no"}, ["use_cpu is 'no'", "true or false"]),
        ({"enable_cpu_affinity": 1}, ["enable_cpu_affinity is 1", "true or false"]),
        ({"distributed_type": ["FSDP"]}, ["distributed_type is ['FSDP']", "not text"]),
        *(
            ({name: value}, [f"{name} is", "not a mapping of keys"])
            for name in ("deepspeed_config", "dynamo_config", "fsdp_config", "parallelism_config")
            for value in (True, ["a"])
        ),
    ],
)
def test_files_that_are_refused(tmp_path, changes, words):
    with pytest.raises(UserError) as refusal:
        check_request(read_launch_file(written(tmp_path, **changes)))
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["zero_optimization is missing"]),
        ({"zero_optimization": True}, ["zero_optimization is true", "not a mapping"]),
        ({"zero_optimization": [2]}, ["zero_optimization is [2]", "not a mapping"]),
        ({"zero_optimization": {"stage": "2"}}, ["zero_optimization.stage is '2'", "without quotes"]),
        ({"zero_optimization": {"stage": True}}, ["zero_optimization.stage is true", "not a whole number"]),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}},
            ["zero_optimization.offload_optimizer is 'cpu'", "not a mapping"],
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}},
            ["zero_optimization.offload_optimizer.device is 'gpu'", "'cpu'"],
        ),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}}, ["reduce_bucket_size is 'big'"]),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True}},
            ["cpu_offload is a former name", "offload_optimizer"],
        ),
        ({"zero_optimization": {"stage": 2}, "bf16": True}, ["bf16 is true", "not a mapping"]),
        ({"zero_optimization": {"stage": 2}, "fp16": None}, ["fp16 is nothing", "not a mapping"]),
        ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": "on"}}, ["bf16.enabled is 'on'", "choose one of"]),
    ],
)
def test_jsons_that_are_refused(tmp_path, settings, words):
    """By whichever way the JSON is named: in a launch file, or as a flag."""
    (tmp_path / "mine.json").write_text(json.dumps(settings))
    named = {"deepspeed_config_file": str(tmp_path / "mine.json")}
    flagged = LaunchRequest("accelerate launch", 2, "DEEPSPEED", False, "no", options=named)
    for refuse in (
        lambda: read_launch_file(written(tmp_path, deepspeed_config=named)),
        lambda: check_request(flagged),
    ):
        with pytest.raises(UserError) as refusal:
            refuse()
        assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_json_in_many_forms_is_read(tmp_path):
    zero = {"stage": 2, "offload_optimizer": {"device": "auto"}, "offload_param": None, "reduce_bucket_size": 5e8}
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}}))
    named = {"deepspeed_config_file": str(tmp_path / "mine.json"), "deepspeed_multinode_launcher": "standard"}
    request = read_launch_file(written(tmp_path, deepspeed_config=named))
    check_request(request)
    assert deepspeed_settings(request)["zero_optimization"] == zero


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fsdp_config": {"fsdp_offload_param": True}}, "'fsdp_config.fsdp_offload_params'"),
        ({"fsdp_config": {"offload_param": True}}, "'fsdp_config.offload_params'"),
        ({"fsdp_config": {"fsdp_verion": 2}}, "'fsdp_config.fsdp_version'"),
        ({"fsdp_config": {"zero_stage": 2}}, "'deepspeed_config.zero_stage'"),
        ({"deepspeed_config": {"zero_stages": 3}}, "'deepspeed_config.zero_stage'"),
        ({"deepspeed_config": {3: 3}}, "valid here: deepspeed_config_file, zero_stage"),
        ({"deepspeed_config": {"mixed_precision": "bf16"}}, "'mixed_precision' stands at the top"),
        ({"dynamo_config": {"dynamo_bakend": "inductor"}}, "'dynamo_config.dynamo_backend'"),
        ({"parallelism_config": {"tp_size": 2}}, "'parallelism_config.parallelism_config_tp_size'"),
        ({"num_proceses": 2}, "'num_processes'"),
        ({"zero_stage": 2}, "'deepspeed_config.zero_stage'"),
    ],
)
def test_misspelt_keys_name_the_nearest(tmp_path, changes, words):
    with pytest.raises(UserError, match=f"unknown key .*{words}"):
        read_launch_file(written(tmp_path, **changes))


def test_every_key_that_accelerate_reads_is_accepted(tmp_path):
    """Those of its launcher's flags, and what its converter to FSDP2 knows, with and without their prefixes."""
    flags = [name for name in vars(launch_command_parser().parse_args(["script"])) if "_" in name]
    fsdp = {*(name for name in flags if name.startswith("fsdp_")), *ARGUMENT_KEY_MAPPING, "fsdp_ignored_modules"}
    dynamo = {name for name in flags if name.startswith("dynamo_")}
    own = {name for name in flags if name.startswith(("deepspeed_", "zero", "offload_", "gradient_"))}
    assert len(own) == 15
    written_keys = {
        "fsdp_config": fsdp | {name.removeprefix("fsdp_") for name in fsdp},
        "dynamo_config": dynamo | {name.removeprefix("dynamo_") for name in dynamo},
        "deepspeed_config": own - {"deepspeed_config_file"},
        "parallelism_config": {name for name in flags if name.startswith("parallelism_config_")},
    }
    sections = {name: dict.fromkeys(keys, None) for name, keys in written_keys.items()}
    top = {field.name: None for field in dataclasses.fields(ClusterConfig) if field.name not in DEEPSPEED_FILE}
    read_launch_file(written(tmp_path, **(top | {"compute_environment": None} | sections)))
    reject_unknown_keys(tmp_path, dict.fromkeys((*top, "fp16", "dynamo_backend")))


@pytest.mark.parametrize(
    ("settings", "precisions", "words"),
    [
        ({"fp16": {"enabled": True}}, possible_precisions("auto", "no"), "enables fp16 and .* is bf16 or no"),
        ({"bf16": {"enabled": True}}, possible_precisions("no", "no"), "enables bf16"),
        ({"bf16": {"enabled": False}}, possible_precisions("bf16", "no"), "disables bf16"),
        ({"fp16": {"enabled": False}}, possible_precisions("auto", "fp16"), "disables fp16"),
    ],
)
def test_a_json_s_own_precision_is_refused(settings, precisions, words):
    with pytest.raises(UserError, match=words):
        check_json_precision(settings, precisions)


@pytest.mark.parametrize("settings", [{}, {"bf16": {"enabled": "auto"}}, {"bf16": {"enabled": True}}, {"bf16": {}}])
def test_a_json_s_precision_that_may_be_the_run_s(settings):
    check_json_precision(settings, possible_precisions("auto", "no"))


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
        # DeepSpeed steps on float32 weights of its own.
        (Offload(), 20 + 4, 0),
        (Offload("cpu"), 4, 16 + 4),
        (Offload("cpu", "cpu"), 0, 20 + 4),
        (Offload("nvme", "nvme"), 0, 4),
        (Offload("none", "cpu"), 16 + 4, 4),
    ],
)
def test_what_an_offloaded_student_takes(tmp_path, offload, on_gpu, on_host):
    """Of two ranks, with a moving average; a checkpoint's copy has weights, moments and average of half of it.

    Beside it are the weights that ZeRO-3 keeps gathered, and without offload a bucket of gradients.
    """
    averaged = parse(toys.recipe(tmp_path, tmp_path, train={"ema_decay": 0.9}))
    engine = "deepspeed-zero3" + "-offload" * offload.is_any
    state = student_state(1000, averaged, StudentLayout(engine, 2, 1, "no", offload, None))
    assert state.buffers == 1000 * (4 if offload.is_any else 8)
    assert state.gpu - state.buffers == 1000 * on_gpu // 2
    assert state.host == 1000 * (on_host + 16) // 2


def test_every_launch_file_has_its_row():
    text = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    assert [file.name for file in SHIPPED if f"`{file.name}`" not in text] == []


LAUNCH = Path(distiller.__file__).parent / "launch"
OF_THE_MACHINE = {"check_gpus", "check_launcher", "check_nvme_room", "check_asynchronous_io"}
"""What only the machine that runs it can tell."""


def calls_by_function() -> dict[str, set[str]]:
    """Every function of `distiller.launch` -> the names that it calls."""
    found: dict[str, set[str]] = {}
    for file in sorted(LAUNCH.glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                calls = (n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))
                found[node.name] = set(calls)
    return found


def test_train_and_check_run_the_same_list_of_launch_checks():
    calls = calls_by_function()
    reached, left = set(), ["check_launch"]
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left += calls.get(name, set())
    assert {name for name in calls if name.startswith("check_")} - reached == OF_THE_MACHINE
    assert "check_launch" in calls["open_world"]
    assert "check_launch" in check.__code__.co_names


def test_an_offload_of_one_process_a_machine_is_refused_without_the_machines(make_recipe):
    request = LaunchRequest("two.yaml", 2, "FSDP", False, "no", num_machines=2)
    fsdp = parse_fsdp({"VERSION": "1", "SHARDING_STRATEGY": "HYBRID_SHARD", "OFFLOAD_PARAMS": "true"})
    with pytest.raises(UserError, match="nothing would be offloaded"):
        check_launch(make_recipe(), Launch(request, 2, fsdp))
