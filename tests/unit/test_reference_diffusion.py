"""Every key of the diffusion task against a plain loop of its own (`tests.reference_diffusion`).

A row changes one key of a recipe. The product's loss, gradient norm and student after a few updates are the reference's
with that key, and the reference's own loss moves with the key: a product that ignored it would fail.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distiller.commands import caching
from distiller.config.diffusion import DiffusionRecipe
from tests import reference_diffusion
from tests.key_changes import leaves_of
from tests.reference_diffusion import Result
from tests.reference_rows import FEATURES, FIVE_STEPS, GUIDED, ROWS, TWO_FEATURES
from tests.reference_toys import assert_same, forget_accelerator, make_folder, recipe_of, run_product

# What diffusers' schedulers do with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")

SECTIONS = ("task", "sampling", "rollout", "data", "cache")
"""Those whose every key is held here; `optim` and `train` are held by tests/unit/test_reference_training.py."""
NO_RESULT = {
    "task.kind": "which task it is",
    "data.held_out": "test_diffusion_is_measured_on_prompts_and_noise_that_training_does_not_have",
    "cache.shard_mib": "test_a_cache_in_several_files_is_the_same_cache",
}
"""Keys that no row changes, and why."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Students and data of all rows; pipelines follow."""
    return make_folder(tmp_path_factory.mktemp("reference"))


_REFERENCES: dict[str, Result] = {}


def reference(recipe: DiffusionRecipe) -> Result:
    """What the recipe comes to; kept, since many rows are compared with the same one."""
    options = recipe.model_dump(mode="json")
    name = json.dumps({key: value for key, value in options.items() if key != "output_dir"})
    if name not in _REFERENCES:
        _REFERENCES[name] = reference_diffusion.run(options)
    return _REFERENCES[name]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_key_means_what_the_reference_says(folder, tmp_path, row):
    recipe = recipe_of(folder, row.pipeline, tmp_path / "run", {**row.given, **row.changed})
    theirs = reference(recipe)
    ours, _ = run_product(recipe)
    assert_same(ours, theirs)
    if row.changed:
        without = reference(recipe_of(folder, row.pipeline, tmp_path / "without", row.given))
        moved = max(abs(a - b) / abs(b) for a, b in zip(theirs.losses, without.losses, strict=True))
        assert moved < 2e-6 if row.keeps else moved > 2e-5


@pytest.mark.parametrize("given", [GUIDED | TWO_FEATURES | {"task.condition_dropout": 0.4}, FIVE_STEPS | GUIDED])
@pytest.mark.parametrize("pipeline", ["wan2", "sd3"])
def test_training_from_a_cache_is_the_reference_s_training(folder, tmp_path, pipeline, given):
    """Two epochs, each with draws of its own."""
    recipe = recipe_of(folder, pipeline, tmp_path / "run", {**given, "teacher.cache": str(tmp_path / "cache")})
    caching.make_cache(recipe)
    forget_accelerator()
    cached = recipe.model_copy(update={"teacher": recipe.teacher.model_copy(update={"placement": "cached"})})
    assert_same(run_product(cached)[0], reference(recipe))


def test_a_cache_in_several_files_is_the_same_cache(folder, tmp_path):
    given = FEATURES | {"task.height": 256, "task.width": 256, "rollout.samples_per_prompt": 4, "cache.draws": 1}
    given |= {"sampling.num_inference_steps": 1, "train.max_steps": 2}
    results = []
    for shard_mib, num_files in ((1, 2), (256, 1)):
        keys = {"teacher.cache": str(tmp_path / f"cache-{shard_mib}"), "cache.shard_mib": shard_mib}
        recipe = recipe_of(folder, "wan", tmp_path / f"run-{shard_mib}", given | keys)
        caching.make_cache(recipe)
        assert len(list((tmp_path / f"cache-{shard_mib}").glob("outputs-*"))) == num_files
        forget_accelerator()
        cached = recipe.model_copy(update={"teacher": recipe.teacher.model_copy(update={"placement": "cached"})})
        results.append(run_product(cached)[0])
        forget_accelerator()
    assert_same(results[0], results[1], tolerance=0.0)


def test_every_key_has_a_row():
    """A key whose value no row changes is a key that may be ignored."""
    keys = {leaf for name in SECTIONS for leaf in leaves_of(DiffusionRecipe.model_fields[name].annotation, f"{name}.")}
    changed = {key for row in ROWS for key in row.changed} | NO_RESULT.keys()
    assert len(keys) > 30
    assert sorted(keys - changed) == []
    assert sorted(NO_RESULT.keys() - keys) == []
