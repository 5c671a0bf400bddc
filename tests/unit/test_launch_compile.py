"""Who says whether the student is compiled: the recipe, or the launch file."""

from __future__ import annotations

from typing import Any

import pytest

from distiller.errors import UserError
from distiller.launch.compile import check_compile, dynamo_plugin
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
def test_one_that_does_not_is_left_to_the_launch_file(monkeypatch, make_recipe, asked, wanted):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    recipe = make_recipe(train={"compile": wanted})
    check_compile(recipe, asked)
    plugin = dynamo_plugin(recipe, asked)
    assert (plugin.backend.value, plugin.mode) == ("INDUCTOR", "reduce-overhead")
    assert not plugin.use_regional_compilation


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_the_recipe_compiles_block_by_block(make_recipe, mode):
    recipe = make_recipe(train={"compile": mode})
    check_compile(recipe, {})
    plugin = dynamo_plugin(recipe, {})
    assert (plugin.backend.value, plugin.mode, plugin.use_regional_compilation) == ("INDUCTOR", mode, True)


@pytest.mark.parametrize("wanted", ["auto", "none"])
def test_nothing_is_compiled_unasked(make_recipe, wanted):
    recipe = make_recipe(train={"compile": wanted})
    check_compile(recipe, {})
    assert dynamo_plugin(recipe, {}).backend.value == "NO"


@pytest.mark.parametrize(("wanted", "is_asked"), [("default", False), ("auto", True)])
def test_features_of_compiled_blocks_are_refused(make_recipe, asked, wanted, is_asked):
    features = {"weight": 0.1, "student_blocks": [0], "teacher_blocks": [1]}
    recipe = make_recipe(train={"compile": wanted}, task={"losses": {"features": features}, "height": 32, "width": 32})
    with pytest.raises(UserError, match=r"task.losses.features reads.*set its weight to 0, or do not compile"):
        check_compile(recipe, asked if is_asked else {})
    check_compile(recipe.model_copy(update={"train": recipe.train.model_copy(update={"compile": "none"})}), {})
