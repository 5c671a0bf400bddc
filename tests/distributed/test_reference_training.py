"""Losses, gradient norms and students of two gloo ranks under DDP, with and without accumulation, beside a plain loop.

Adam hides a wrong scale of the gradients from every student: their norms do not.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from distiller.config.recipe import Recipe
from tests import plain_classification, plain_language
from tests.beside_plain import Ran, assert_same, run
from tests.distributed.ranks import on_ranks
from tests.reference_cases import (
    classification_folder,
    classification_recipe,
    language_folder,
    language_recipe,
)

FEATURES = {"weight": 0.5, "student_blocks": [0, 1], "teacher_blocks": [2, 1]}
LANGUAGE = {"task.losses.alpha": 0.7, "task.losses.features": FEATURES, "data.packing": False}
PICTURES = {"task.losses.features": FEATURES | {"teacher_blocks": [1, 4]}, "data.augmentation": "crop-flip"}
SHARED = {"train.samples_per_update": 8, "train.max_steps": 3, "train.ema_decay": 0.7, "optim.max_grad_norm": 0.5}
CASES = {
    ("language", 4): LANGUAGE,
    ("language", 2): {**LANGUAGE, "optim.schedule": "cosine"},
    ("bias", 2): {"student": {"config": "phi.json"}, "task.losses.divergence.kind": "jsd"},
    ("pictures", 4): {**PICTURES, "student": {"config": "resnet.json", "batch_norm": "frozen"}},
    ("pictures", 2): {**PICTURES, "student": {"config": "resnet.json", "batch_norm": "group"}},
}
"""By a name and the micro-batch of a rank: 4 are one, and 2 are two an update."""


def recipe_of(name: str, batch_size: int, folder: Path, place: Path) -> Recipe:
    changes: dict[str, Any] = CASES[name, batch_size] | SHARED | {"train.batch_size": batch_size}
    if name == "pictures":
        return classification_recipe(folder / "pictures", place, changes)
    return language_recipe(folder / "language", place, changes)


def train_all(folder: Path, places: dict[tuple[str, int], Path]) -> bytes:
    # Plain bytes: tensors that are shared between processes would need the rank that made them.
    return pickle.dumps({case: run(recipe_of(*case, folder, place), stays=True) for case, place in places.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("reference")
    language_folder(root / "language")
    classification_folder(root / "pictures")
    return root


@pytest.fixture(scope="module")
def trained(folder) -> list[dict[tuple[str, int], Ran]]:
    places = {case: folder / f"{case[0]}-{case[1]}" for case in CASES}
    return [pickle.loads(ran) for ran in on_ranks(2, train_all, folder, places)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_two_ranks_are_the_plain_loop(folder, trained, case):
    recipe = recipe_of(*case, folder, folder / "plain")
    train_plainly = (plain_classification if case[0] == "pictures" else plain_language).train_plainly
    expected, first = train_plainly(recipe)
    for ranks in trained:
        assert_same(ranks[case], expected, first)
