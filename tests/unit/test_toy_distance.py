"""A distance between predictions of one function and one line in DISTANCES is a value of the recipe, and is trained."""

from __future__ import annotations

import pytest
from torch import Tensor

from distiller.config import loading
from distiller.config.diffusion import PredictionLoss
from distiller.config.prediction_distances import DISTANCES, DistanceSpec
from distiller.errors import UserError
from tests import recipe_keys, reference_diffusion
from tests.reference_toys import assert_same, make_folder, recipe_of, run_product
from tests.registered import register

KIND = "task.losses.prediction.kind"


def absolute_distance(student: Tensor, target: Tensor, options: PredictionLoss) -> Tensor:
    """The mean absolute error."""
    del options
    return (student.float() - target.float()).abs().flatten(1).mean(1)


@pytest.fixture
def toy(monkeypatch) -> None:
    spec = DistanceSpec(f"{__name__}:absolute_distance", "absolute error")
    register(monkeypatch, "diffusion", DISTANCES, "toy", spec)


def test_the_recipe_takes_it_and_lists_it(toy):
    assert loading.load("digits-wan", [f"{KIND}=toy"]).task.losses.prediction.kind == "toy"
    with pytest.raises(UserError, match=rf"^'{KIND}=tou': {KIND}: given 'tou'; it must be 'mse', 'huber' or 'toy'$"):
        loading.load("digits-wan", [f"{KIND}=tou"])
    meaning = "squared error, or linear beyond huber_delta, or absolute error"
    assert f"| `kind` | `mse`, `huber`, `toy` | `mse` | {meaning} |" in recipe_keys.page()


def test_a_run_computes_it(toy, tmp_path, monkeypatch):
    """Losses, terms, gradient norms and the student of two updates are the reference's with this formula."""
    given = {KIND: "toy", "task.timesteps.weighting": "cosmap", "train.max_steps": 2}
    recipe = recipe_of(make_folder(tmp_path), "wan", tmp_path / "run", given)
    monkeypatch.setattr(reference_diffusion, "distance", lambda error, options: error)
    assert_same(run_product(recipe)[0], reference_diffusion.run(recipe.model_dump(mode="json")))


def test_without_the_line_it_is_not_there():
    with pytest.raises(UserError, match=r"it must be 'mse' or 'huber'$"):
        loading.load("digits-wan", [f"{KIND}=toy"])
    assert "`toy`" not in recipe_keys.page()
