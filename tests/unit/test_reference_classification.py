"""Task `classification` beside a plain loop (`tests.plain_classification`): every key that moves its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageClassification

from distiller.build import build_task
from distiller.commands.caching import make_cache
from distiller.config.classification import ClassificationRecipe
from distiller.teachers.factory import open_alone
from tests import toys
from tests.beside_plain import (
    assert_moved_alike,
    assert_named_tests_exist,
    assert_same,
    changes_key,
    forget_accelerate,
    keys_of,
    run,
    unique_rows,
)
from tests.plain_classification import train_plainly, train_teacher
from tests.reference_cases import classification_folder, classification_recipe

LOSSES = "task.losses."
DISTILLATION, FEATURES = f"{LOSSES}distillation.", f"{LOSSES}features."
VIT = {"teacher.path": "vit", "student": {"config": "vit.json"}}
PAIRS = {f"{FEATURES}weight": 2.0, f"{FEATURES}student_blocks": [1, 0], f"{FEATURES}teacher_blocks": [4, 1]}
TOKENS = {**VIT, **PAIRS, f"{FEATURES}teacher_blocks": [3, 0]}
CROPS = {"data.augmentation": "crop-flip", "data.crop_scale": 0.3}
SAVED = {
    "data": {"kind": "datasets", "path": "saved", "image_column": "view", "label_column": "animal", "split": "all"}
}
CACHED = {"teacher.placement": "cached"}
BARE = {"teacher.path": "bare", "teacher_training.max_steps": 3, "teacher_training.batch_size": 5}

ROWS: dict[str, list[dict[str, Any]]] = {
    "seed": [{"seed": 0, **PAIRS, **CROPS}],
    "task.losses.distillation.alpha": [{f"{DISTILLATION}alpha": alpha} for alpha in (0.0, 0.3, 1.0)],
    "task.losses.distillation.temperature": [
        {f"{DISTILLATION}temperature": value, f"{DISTILLATION}alpha": 0.8} for value in (0.5, 5.0)
    ],
    "task.losses.features.weight": [{**PAIRS, f"{FEATURES}weight": 0.1}, {**TOKENS, f"{DISTILLATION}alpha": 0.0}],
    "task.losses.features.student_blocks": [PAIRS],
    "task.losses.features.teacher_blocks": [TOKENS, {**TOKENS, f"{FEATURES}teacher_blocks": [0, 3]}],
    # No small ResNet: the backward pass of a 1 x 1 convolution with stride 2 and fewer than 8 input channels corrupts
    # memory in this order on CPUs without AVX-512 (torch 2.13, oneDNN).
    "task.channels_last": [{**VIT, "task.channels_last": True}],
    "student.config": [VIT, {**VIT, "student": {"config": "dropout.json"}}],
    "student.path": [{"student": {"path": "resnet"}}, {**VIT, "student": {"path": "vit"}}],
    "student.num_layers": [{**VIT, "student": {"num_layers": count}} for count in (1, 2)],
    "student.depths": [{"student": {"depths": depths}} for depths in ([1, 2], [2, 1])],
    "student.batch_norm": [
        *({"student": {"config": "resnet.json", "batch_norm": kind}, **CROPS} for kind in ("batch", "frozen", "group")),
        {"student": {"path": "resnet", "batch_norm": "frozen"}, f"{DISTILLATION}alpha": 0.2},
    ],
    "data.kind": [
        {"data": {"kind": "digits"}, "data.max_samples": 20, "teacher.path": "ten", "student": {"path": "ten"}}
    ],
    **{f"data.{key}": [SAVED] for key in ("image_column", "label_column")},
    "data.split": [SAVED, SAVED | {"data.split": "few", "data.held_out": 0.0, "train.batch_size": 3}],
    "data.path": [{"data.path": "others"}],
    "data.max_samples": [{"data.max_samples": 11}],
    "data.held_out": [{"data.held_out": share} for share in (0.0, 0.3)],
    "data.augmentation": [{"data.augmentation": kind} for kind in ("crop", "crop-flip")],
    "data.crop_scale": [{"data.augmentation": "crop", "data.crop_scale": scale} for scale in (0.1, 1.0)],
    "cache.draws": [
        {**CACHED, **CROPS, **PAIRS, "cache.draws": 2, "train.max_steps": 5},
        {**CROPS, "cache.draws": 1},
        {**CACHED, **CROPS},
    ],
    "cache.shard_mib": [{**CACHED, "cache.shard_mib": 1}],
    "train.batch_size": [
        {"train.batch_size": 2, "train.samples_per_update": 8, "student": {"config": "resnet.json", "batch_norm": kind}}
        for kind in ("batch", "frozen")
    ]
    + [{"train.batch_size": 1, "train.samples_per_update": 4, **TOKENS}],
    "train.ema_decay": [{"train.ema_decay": 0.6}],
}
LESSONS: list[dict[str, Any]] = [
    {"max_steps": 1, "batch_size": 64},
    {
        "max_steps": 6,
        "batch_size": 3,
        "lr": 1e-1,
        "warmup_steps": 2,
        "weight_decay": 3.0,
        "label_smoothing": 0.3,
        "seed": 7,
    },
    {"max_steps": 3, "warmup_steps": 0, "weight_decay": 0.0, "augmentation": "none"},
    {"max_steps": 2, "augmentation": "crop-flip"},
]
ELSEWHERE = {"task.kind": "tests/unit/test_reference_classification.py::test_the_product_is_the_plain_loop"}
"""Where a key is held that no plain loop can show."""
SECTIONS = ("seed", "task", "student", "data", "cache", "teacher_training")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return classification_folder(tmp_path_factory.mktemp("classification"))


@pytest.mark.parametrize("changes", unique_rows(ROWS))
def test_the_product_is_the_plain_loop(folder, tmp_path, changes):
    recipe = classification_recipe(folder, tmp_path, changes)
    if recipe.teacher.placement == "cached":
        make_cache(recipe)
        forget_accelerate()
    assert_same(run(recipe), *train_plainly(recipe))


@pytest.mark.parametrize("changes", LESSONS, ids=str)
def test_a_teacher_is_trained_as_by_the_plain_loop(folder, tmp_path, changes):
    lessons = {f"teacher_training.{key}": value for key, value in changes.items()}
    recipe = classification_recipe(
        folder, tmp_path, BARE | {"data.augmentation": "crop", "data.crop_scale": 0.4} | lessons
    )
    recipe = recipe.model_copy(update={"cache_dir": str(tmp_path / "stages")})
    task = build_task(recipe)
    task.prepare_stages(toys.ALONE, torch.float32)
    ours = load_file(next((tmp_path / "stages").glob("teacher-*/model.safetensors")))
    theirs = train_teacher(recipe).state_dict()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.teacher_training.seed)
        config = AutoConfig.from_pretrained(recipe.teacher.path)
        first = AutoModelForImageClassification.from_config(config).state_dict()
    assert_moved_alike(ours, theirs, first, 1e-3)


@pytest.mark.parametrize("changes", [VIT, {}], ids=["vit", "resnet"])
def test_the_teacher_runs_outside_of_the_caller_s_autocast(folder, tmp_path, changes):
    recipe = classification_recipe(folder, tmp_path, changes | {"train.mixed_precision": "bf16"})
    exact, _ = train_plainly(recipe)
    assert [line["loss"] for line in run(recipe).metrics] == pytest.approx(exact.losses, rel=2e-2)
    task = build_task(recipe)
    data = task.load_data(toys.ALONE, None)
    request = task.request(task.collate([data[0, number] for number in range(3)]))
    teacher, answers = open_alone(task.network, recipe, torch.float32, torch.device("cpu")), []
    for is_on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            answers.append(teacher.predict([request])[0])
    teacher.close()
    assert torch.equal(answers[0]["logits"], answers[1]["logits"])


def test_every_key_has_a_row_that_changes_it():
    assert [key for key, rows in ROWS.items() if not any(changes_key(row, key) for row in rows)] == []
    keys = keys_of(ClassificationRecipe, SECTIONS)
    held = ROWS.keys() | ELSEWHERE.keys() | {f"teacher_training.{key}" for lessons in LESSONS for key in lessons}
    assert [key for key in keys if key not in held] == []
    assert {key for key in held if key not in keys and not key.startswith("train.")} == set()
    assert_named_tests_exist(ELSEWHERE.values())
