"""Recipes: strict, frozen, complete when written out."""

import subprocess
import sys

import pytest
import yaml
from pydantic import ValidationError

from distiller.config.loading import dump, load, parse
from distiller.errors import UserError
from distiller.storage.packaged_files import recipe_names
from distiller.storage.yaml_files import dump_yaml

MINIMAL = {
    "teacher": {"path": "teacher"},
    "student": {"config": "student.json"},
    "data": {"path": "prompts.txt"},
    "train": {"max_steps": 1},
}


def test_every_default_is_written_out_and_read_back_the_same():
    recipe = parse(MINIMAL)
    written = yaml.safe_load(dump(recipe))
    assert parse(written) == recipe
    assert written["optim"]["betas"] == [0.9, 0.999]
    assert written["task"]["losses"]["prediction"] == {"weight": 1.0, "kind": "mse", "huber_delta": 1.0}


def test_a_recipe_is_frozen():
    with pytest.raises(ValidationError):
        parse(MINIMAL).seed = 1


def test_folders_that_are_written_may_begin_with_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    teacher = {"path": "teacher", "cache": "~/outputs"}
    recipe = parse(MINIMAL | {"output_dir": "~/run", "cache_dir": "~/stages", "teacher": teacher})
    assert (recipe.output_dir, recipe.cache_dir) == ("/home/me/run", "/home/me/stages")
    assert recipe.teacher.cache == "/home/me/outputs"


@pytest.mark.parametrize("text", ["1e-4", "0.0001", "1.0e-4"])
def test_numbers_are_read_as_people_write_them(tmp_path, text):
    """PyYAML alone reads 1e-4 as a string."""
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(MINIMAL) + f"optim:\n  lr: {text}\n")
    assert load(str(file)).optim.lr == 1e-4
    assert load(str(file), [f"optim.lr={text}"]).optim.lr == 1e-4


def test_overrides_reach_into_sections_that_the_file_does_not_have(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    recipe = load(
        str(file),
        [
            "task.losses.features.weight=0.5",
            "task.losses.features.student_blocks=[0, 2]",
            "task.losses.features.teacher_blocks=[1, 5]",
            "tracking.trackers=[wandb]",
        ],
    )
    assert recipe.task.losses.features.student_blocks == (0, 2)
    assert recipe.tracking.trackers == ("wandb",)


@pytest.mark.parametrize("name", recipe_names())
def test_packaged_recipes_are_valid(name):
    load(name)


def test_recipes_are_checked_without_importing_torch():
    code = "import distiller.cli, distiller.config.loading, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_override_replaces_what_the_file_says_in_another_way(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_yaml(MINIMAL | {"train": {"max_steps": 1, "samples_per_update": 64}}))
    recipe = load(str(file), ["train.gradient_accumulation_steps=2", "student.num_layers=4", "student.ffn_dim=8"])
    assert (recipe.train.samples_per_update, recipe.train.gradient_accumulation_steps) == (None, 2)
    assert (recipe.student.config, recipe.student.num_layers, recipe.student.ffn_dim) == (None, 4, 8)
    assert load(str(file)).train.samples_per_update == 64
    with pytest.raises(UserError, match="give one"):
        load(str(file), ["train.gradient_accumulation_steps=2", "train.samples_per_update=8"])
