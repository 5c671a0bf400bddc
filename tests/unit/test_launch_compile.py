"""Who says whether the student is compiled: the recipe, or the launch file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distiller.errors import UserError
from distiller.launch import block_compilation
from distiller.launch.block_compilation import MIN_UPDATES
from distiller.launch.compile import check_compile, student_compile_mode
from distiller.launch.request import read_launch_file
from tests.questionnaire import MULTI_GPU, answer

DYNAMO = {
    "optimize your script with torch dynamo": "yes",
    "Which dynamo backend": "inductor",
    "customize the defaults sent to torch.compile": "yes",
    "Which mode": "reduce-overhead",
}


@pytest.fixture
def asked(monkeypatch, tmp_path) -> dict[str, Any]:
    """What `accelerate config` writes when it is told to compile."""
    return dict(read_launch_file(answer(monkeypatch, tmp_path / "launch.yaml", MULTI_GPU | DYNAMO)).options)


@pytest.mark.parametrize("wanted", ["none", "default", "max-autotune"])
def test_a_recipe_that_contradicts_the_launch_file_is_refused(make_recipe, asked, wanted):
    words = f"train.compile is {wanted} and the launch file says reduce-overhead .*inductor.*; remove it from one"
    with pytest.raises(UserError, match=words):
        check_compile(make_recipe(train={"compile": wanted}), asked)


@pytest.mark.parametrize("wanted", ["auto", "reduce-overhead"])
def test_one_that_does_not_is_left_to_the_launch_file(make_recipe, asked, wanted):
    check_compile(make_recipe(train={"compile": wanted}), asked)


def test_features_of_blocks_that_accelerate_compiles_are_refused(make_recipe, asked):
    features = {"weight": 0.1, "student_blocks": [0], "teacher_blocks": [1]}
    recipe = make_recipe(task={"losses": {"features": features}, "height": 32, "width": 32})
    with pytest.raises(UserError, match=r"task.losses.features reads.*set its weight to 0, or take dynamo_config out"):
        check_compile(recipe, asked)
    check_compile(recipe, {})


@pytest.mark.parametrize("engine", ["fsdp1", "deepspeed-zero3"])
def test_engines_that_work_inside_the_blocks_are_refused(make_recipe, engine):
    recipe = make_recipe(train={"compile": "default"})
    with pytest.raises(UserError, match=r"compilation \(default\) is not supported with .*or do not compile"):
        check_compile(recipe, {}, engine)
    for suited in ("", "fsdp2", "deepspeed-zero2"):
        check_compile(recipe, {}, suited)


@pytest.mark.parametrize(
    ("wanted", "engine", "device", "num_updates", "mode"),
    [
        ("auto", "ddp", "cuda", MIN_UPDATES, "default"),
        ("auto", "ddp", "cuda", MIN_UPDATES - 1, "none"),
        ("auto", "single", "cpu", MIN_UPDATES, "none"),
        ("auto", "deepspeed-zero3-offload", "cuda", MIN_UPDATES, "none"),
        ("auto", "fsdp1", "cuda", MIN_UPDATES, "none"),
        ("none", "ddp", "cuda", MIN_UPDATES, "none"),
        ("max-autotune", "single", "cpu", 1, "max-autotune"),
    ],
)
def test_the_student_is_compiled_in_long_runs(monkeypatch, make_recipe, wanted, engine, device, num_updates, mode):
    monkeypatch.setattr(block_compilation, "why_no_compiler", lambda device: "")
    recipe = make_recipe(train={"compile": wanted})
    assert student_compile_mode(recipe, engine, torch.device(device), num_updates) == mode


def test_an_engine_that_no_file_named_is_refused_too(make_recipe):
    recipe = make_recipe(train={"compile": "default"})
    with pytest.raises(UserError, match=r"train.compile is default, which deepspeed-zero3 does not support"):
        student_compile_mode(recipe, "deepspeed-zero3", torch.device("cpu"), 1)


@pytest.mark.parametrize(
    ("engine", "train", "words"),
    [
        ("fsdp2", {}, "FSDP2 gathers weights into other memory"),
        ("", {"gradient_accumulation_steps": 2}, "several micro-batches"),
        ("", {"samples_per_update": 32}, "several micro-batches"),
    ],
)
def test_cuda_graphs_are_refused_where_their_memory_is_used_anew(make_recipe, engine, train, words):
    recipe = make_recipe(train={"compile": "reduce-overhead", **train})
    with pytest.raises(UserError, match=f"train.compile is reduce-overhead, .*{words}.*; set it to default"):
        check_compile(recipe, {}, engine)
    check_compile(make_recipe(train={"compile": "reduce-overhead"}), {}, "")
