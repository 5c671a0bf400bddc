"""The keys of a classifier's cache and of the trained teacher's stage: every field, and every key of the recipe."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from distiller.build import build_task
from distiller.cache.key import content_key
from distiller.config.classification import ClassificationRecipe, TeacherTraining
from distiller.config.sections import flatten
from tests.beside_plain import keys_of
from tests.key_tables import Change, after, changed, made_once, named
from tests.reference_cases import classification_folder, classification_recipe

CROPS = {"data.augmentation": "crop"}
BARE = {"teacher.path": "bare", "teacher_training.max_steps": 1, "teacher_training.augmentation": "crop"}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows name folders relative to the working directory, and stages are made there."""
    monkeypatch.chdir(tmp_path)


def other_weights(folder: Path) -> None:
    file = folder / "resnet" / "model.safetensors"
    weights = load_file(file)
    weights["classifier.1.bias"][0] += 1
    save_file(weights, file, {"format": "pt"})


def other_config(folder: Path) -> None:
    for name in ("resnet", "bare"):
        file = folder / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "gelu"}))


def other_processor(folder: Path) -> None:
    for name in ("resnet", "bare"):
        file = folder / name / "preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.4, 0.5, 0.5]}))


def other_picture(folder: Path) -> None:
    """Of another size in bytes."""
    Image.fromarray(np.zeros((36, 40, 3), np.uint8)).save(folder / "pictures" / "cat" / "000.png")


def one_more_picture(folder: Path) -> None:
    shutil.copy(folder / "pictures" / "cat" / "000.png", folder / "pictures" / "cat" / "100.png")


def another_class(folder: Path) -> None:
    (folder / "pictures" / "cat" / "000.png").rename(folder / "pictures" / "dog" / "100.png")


CHANGES: list[tuple[Change, dict[str, Any], set[str]]] = [
    (other_weights, {}, {"teacher.weights"}),
    ({"teacher.dtype": "bfloat16"}, {}, {"teacher.dtype"}),
    ({"teacher.quantization": "int8"}, {}, {"teacher.quantization"}),
    ({"train.tf32": True}, {}, {"train.tf32"}),
    ({"data.max_samples": 9}, {}, {"data.samples"}),
    ({"data.held_out": 0.5}, {}, {"data.samples", "data.digest"}),
    ({"data.path": "others"}, {}, {"data.samples", "data.digest", "inputs.pictures"}),
    (other_picture, {}, {"data.digest", "inputs.pictures"}),
    (one_more_picture, {}, {"data.samples", "data.digest", "inputs.pictures"}),
    (another_class, {}, {"data.digest", "inputs.pictures"}),
    (other_config, {}, {"inputs.config.hidden_act"}),
    (other_processor, {}, {"inputs.processor.image_mean"}),
    ({"data.augmentation": "crop"}, {}, {"inputs.augmentation", "inputs.crop_scale", "seed"}),
    ({"data.augmentation": "crop-flip"}, CROPS, {"inputs.augmentation"}),
    ({"data.crop_scale": 0.3}, CROPS, {"inputs.crop_scale"}),
    ({"seed": 4}, CROPS, {"seed"}),
]
"""A change, of a recipe with these keys, and the fields of the key that it changes."""
NEVER = {"format", "task.kind", "form.kind"}
"""Fields that no recipe of this task changes."""
NO_CHANGE: dict[str, Any] = {
    "output_dir": "elsewhere",
    "cache_dir": "stages-elsewhere",
    "seed": 4,
    "task.losses.distillation.alpha": 0.1,
    "task.losses.distillation.temperature": 2.0,
    "task.losses.features.weight": 0.0,
    "task.channels_last": True,
    "student": {"path": "resnet"},
    "teacher.placement": "cpu",
    "data.crop_scale": 0.3,
    "data.split": "unread",
    "data.image_column": "unread",
    "data.label_column": "unread",
    # How many draws there are is the layout's, which a run checks beside the key.
    "cache.draws": 2,
    "cache.shard_mib": 1,
    "train.batch_size": 2,
    "optim.lr": 0.5,
    "evaluation.num_samples": 1,
}
"""Values of keys that a cache of whole pictures' answers does not depend on."""
STAGE_CHANGES: list[tuple[Change, str | None]] = [
    (other_config, "config.hidden_act"),
    (other_processor, "processor.image_mean"),
    (other_picture, "pictures"),
    (another_class, "data"),
    ({"data.path": "others"}, "data"),
    ({"data.held_out": 0.5}, "data"),
    ({"data.crop_scale": 0.3}, "crop_scale"),
    ({"teacher_training.max_steps": 2}, "training.max_steps"),
    ({"teacher_training.batch_size": 3}, "training.batch_size"),
    ({"teacher_training.lr": 0.5}, "training.lr"),
    ({"teacher_training.warmup_steps": 3}, "training.warmup_steps"),
    ({"teacher_training.weight_decay": 0.5}, "training.weight_decay"),
    ({"teacher_training.label_smoothing": 0.5}, "training.label_smoothing"),
    ({"teacher_training.augmentation": "none"}, "training.augmentation"),
    ({"teacher_training.seed": 5}, "training.seed"),
    # The student's alone.
    ({"seed": 5}, None),
    ({"data.augmentation": "crop-flip"}, None),
    ({"data.max_samples": 9}, None),
    ({"student": {"path": "resnet"}}, None),
    ({"train.batch_size": 2}, None),
]
"""What is changed, and the field of the trained teacher's key that says so; None where it is the same teacher."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return classification_folder(tmp_path_factory.mktemp("keys"))


def key_of(folder: Path, place: Path, changes: dict[str, Any]) -> dict[str, Any]:
    recipe = classification_recipe(folder, place, changes)
    dtype = torch.bfloat16 if recipe.teacher.dtype == "bfloat16" else torch.float32
    return flatten(content_key(recipe, build_task(recipe), dtype))


def stage_of(folder: Path, place: Path, changes: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Where the trained teacher would lie, and its key."""
    task: Any = build_task(classification_recipe(folder, place, {"cache_dir": str(place), **BARE, **changes}))
    return task.missing_stage(torch.float32), flatten(task._trained.stage.key)


@pytest.fixture(scope="module")
def keys(folder, tmp_path_factory) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Keys of recipes, each made once."""
    return made_once(lambda changes: key_of(folder, tmp_path_factory.mktemp("place"), changes))


@pytest.mark.parametrize(("change", "base", "fields"), CHANGES, ids=[named(change) for change, _, _ in CHANGES])
def test_what_changes_an_output_changes_these_fields_of_the_key(folder, tmp_path, keys, change, base, fields):
    files, changes = after(change, base, folder, tmp_path)
    assert changed(keys(base), key_of(files, tmp_path, changes)) == fields


def test_what_changes_no_output_leaves_the_key_alone(folder, tmp_path, keys):
    assert changed(keys({}), key_of(folder, tmp_path, NO_CHANGE)) == set()


def test_every_field_of_the_key_has_a_row(keys):
    fields, moved = keys({}).keys() | keys(CROPS).keys(), {field for _, _, found in CHANGES for field in found}
    descriptions = ("inputs.config.", "inputs.processor.")
    assert {field for field in fields - moved - NEVER if not field.startswith(descriptions)} == set()
    assert moved <= fields


def test_every_key_of_the_recipe_has_a_row():
    """Of what a teacher's output could depend on: it does, or it does not."""
    recipe_keys = keys_of(ClassificationRecipe, ("seed", "task", "data", "cache"))
    rows = {key for change, _, _ in CHANGES if isinstance(change, dict) for key in change} | NO_CHANGE.keys()
    # Another kind reads other pictures, which have rows; features are outputs beside the logits, asked for by name.
    implied = {"task.kind", "data.kind"}
    implied |= {f"task.losses.features.{side}_blocks" for side in ("student", "teacher")}
    assert [key for key in recipe_keys if key not in rows | implied] == []


@pytest.mark.parametrize(("change", "field"), STAGE_CHANGES, ids=[named(change) for change, _ in STAGE_CHANGES])
def test_what_changes_the_trained_teacher_is_another_stage(folder, tmp_path, change, field):
    files, changes = after(change, {}, folder, tmp_path)
    (place, key), (other_place, other_key) = stage_of(folder, tmp_path, {}), stage_of(files, tmp_path, changes)
    assert (place != other_place) == (field is not None)
    assert field is None or field in changed(key, other_key)


def test_every_field_of_the_stage_s_key_has_a_row(folder, tmp_path):
    _, key = stage_of(folder, tmp_path, {})
    rows = {field for _, field in STAGE_CHANGES}
    assert {field for field in key if not field.startswith(("config.", "processor."))} <= rows
    assert {f"training.{name}" for name in TeacherTraining.model_fields} <= rows
