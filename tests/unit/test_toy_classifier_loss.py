"""A classifier's loss of one file and one line in LOSSES has its section of the recipe, and is trained."""

from __future__ import annotations

from typing import final

import pytest
from pydantic import Field
from torch import Tensor

from distiller.build import build_task
from distiller.config import loading
from distiller.config.classification_losses import LOSSES, LossSpec
from distiller.config.sections import Section, Weight
from distiller.errors import UserError
from distiller.vision.network import LOGITS
from distiller.vision.objective import ClassifierLoss, Compared, Term
from tests import plain_classification, recipe_keys
from tests.beside_plain import assert_same, run
from tests.reference_cases import classification_folder, classification_recipe
from tests.registered import register


@final
class ToyOptions(Section):
    """Absolute error of the student's logits, as far as it is above a margin."""

    weight: Weight = Field(default=0.0, description="of this term in the sum; 0 = off")
    margin: Weight = Field(default=0.1, description="error of a logit that costs nothing")


@final
class ToyLoss(ClassifierLoss):
    """`toy`: see `ToyOptions`."""

    def __init__(self, options: ToyOptions) -> None:
        self._options = options

    @property
    def wanted(self) -> tuple[str, ...]:
        return (LOGITS,) if self._options.weight else ()

    def terms(self, compared: Compared) -> list[Term]:
        if not self._options.weight:
            return []
        error = (compared.logits.float() - compared.teacher[LOGITS].float()).abs()
        return [Term("toy", self._options.weight, (error - self._options.margin).relu().sum())]


@pytest.fixture
def toy(monkeypatch) -> None:
    spec = LossSpec(ToyOptions, f"{__name__}:ToyLoss")
    register(monkeypatch, "classification", LOSSES, "toy", spec)


def test_the_recipe_takes_it_and_lists_it(toy):
    losses = loading.load("digits-resnet", ["task.losses.toy.weight=0.5"]).task.losses
    assert losses.toy == ToyOptions(weight=0.5)
    with pytest.raises(UserError, match=r"unknown key 'task\.losses\.tou'; did you mean 'task\.losses\.toy'\?$"):
        loading.load("digits-resnet", ["task.losses.tou.weight=0.5"])
    sections = r"task\.losses\.distillation, task\.losses\.features, task\.losses\.toy"
    with pytest.raises(UserError, match=rf"unknown key 'task\.losses\.another'; valid here: {sections}$"):
        loading.load("digits-resnet", ["task.losses.another.weight=0.5"])
    page = recipe_keys.page()
    assert f"## `task.losses.toy`, of task classification\n\n{ToyOptions.__doc__}\n" in page
    assert "| `margin` | number >= 0 | `0.1` | error of a logit that costs nothing |" in page


@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_a_run_computes_it(toy, tmp_path, monkeypatch, alpha):
    """Losses, terms, gradient norms and the student of three updates are the plain loop's with this formula."""
    plain_terms = plain_classification.logit_terms

    def with_toy(losses, ours: Tensor, theirs: Tensor, labels: Tensor):
        excess = ((ours - theirs).abs() - losses.toy.margin).clamp(min=0)
        return plain_terms(losses, ours, theirs, labels) | {"toy": (losses.toy.weight, excess.sum())}

    monkeypatch.setattr(plain_classification, "logit_terms", with_toy)
    keys = {"toy.weight": 0.5, "toy.margin": 0.3, "distillation.alpha": alpha}
    changes = {f"task.losses.{key}": value for key, value in keys.items()}
    recipe = classification_recipe(classification_folder(tmp_path / "files"), tmp_path, changes)
    ours = run(recipe)
    assert_same(ours, *plain_classification.train_plainly(recipe))
    assert all(line["loss/toy"] > 0 for line in ours.metrics)


def test_the_teacher_is_asked_where_it_has_a_weight(toy, tmp_path):
    folder = classification_folder(tmp_path / "files")
    for weight in (0.0, 0.5):
        changes = {"task.losses.distillation.alpha": 0.0, "task.losses.toy.weight": weight}
        assert build_task(classification_recipe(folder, tmp_path, changes)).needs_live_teacher == (weight > 0)


def test_without_the_line_it_is_not_there():
    with pytest.raises(UserError, match=r"valid here: task\.losses\.distillation, task\.losses\.features$"):
        loading.load("digits-resnet", ["task.losses.toy.weight=0.5"])
    assert "task.losses.toy" not in recipe_keys.page()
