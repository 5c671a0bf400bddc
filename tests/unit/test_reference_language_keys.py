"""The keys of a language cache and of the tokenised stage: every field, and every key of the recipe, one by one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distiller.build import build_task
from distiller.cache.key import content_key
from distiller.config.causal_lm import LanguageRecipe
from distiller.config.sections import flatten
from tests import toy_causal_lm
from tests.beside_plain import keys_of
from tests.key_tables import Change, after, changed, made_once, named
from tests.reference_cases import language_folder, language_recipe

TEMPERATURE = "task.losses.divergence.temperature"
ANSWERS = {"data.path": "answers.jsonl"}
SPARSE = {"cache.form": "topk+sampled", "cache.k": 3, "cache.samples": 4}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows name folders relative to the working directory, and stages are made there."""
    monkeypatch.chdir(tmp_path)


def other_weights(folder: Path) -> None:
    file = folder / "teacher" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][0] += 1
    save_file(weights, file, {"format": "pt"})


def other_config(folder: Path) -> None:
    file = folder / "teacher" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.5}))


def other_tokenizer(folder: Path) -> None:
    toy_causal_lm.make_tokenizer((*toy_causal_lm.WORDS[1:], toy_causal_lm.WORDS[0])).save_pretrained(folder / "teacher")


def other_template(folder: Path) -> None:
    tokenizer = toy_causal_lm.make_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder / "teacher")


def other_text(folder: Path) -> None:
    file = folder / "texts.jsonl"
    file.write_text(file.read_text().replace("cat", "dog", 1))


def one_more_text(folder: Path) -> None:
    with (folder / "texts.jsonl").open("a") as stream:
        stream.write('{"text": "the red fox"}\n')


CHANGES: list[tuple[Change, dict[str, Any], set[str]]] = [
    (other_weights, {}, {"teacher.weights"}),
    ({"teacher.dtype": "bfloat16"}, {}, {"teacher.dtype"}),
    ({"teacher.quantization": "int8"}, {}, {"teacher.quantization"}),
    ({"train.tf32": True}, {}, {"train.tf32"}),
    ({"data.max_length": 16}, {}, {"data.max_length", "data.digest"}),
    ({"data.packing": True}, {}, {"data.packing", "data.samples", "data.digest"}),
    ({"data.held_out": 0.5}, {}, {"data.held_out", "data.samples", "data.digest"}),
    ({"data.max_samples": 9}, {}, {"data.samples", "data.digest"}),
    ({"data.path": "answers.jsonl"}, {}, {"data.digest"}),
    (other_text, {}, {"data.digest"}),
    (one_more_text, {}, {"data.samples", "data.digest"}),
    (other_tokenizer, {}, {"data.tokenizer", "data.digest"}),
    (other_template, {}, {"data.tokenizer"}),
    (other_config, {}, {"inputs.config.rms_norm_eps"}),
    ({"cache.form": "topk"}, {}, {"form.kind", "form.k", "form.temperature", "form.vocabulary"}),
    ({"cache.form": "sampled"}, SPARSE, {"form.kind", "form.k"}),
    ({"cache.k": 4}, SPARSE, {"form.k"}),
    ({"cache.samples": 5}, SPARSE, {"form.samples"}),
    ({TEMPERATURE: 2.0}, SPARSE, {"form.temperature"}),
    ({"seed": 4}, SPARSE, {"form.seed"}),
]
"""A change, of a recipe with these keys, and the fields of the key that it changes."""
NEVER = {"format", "task.kind", "form.vocabulary"}
"""Fields that no recipe of this task changes by itself: the vocabulary is one of the teacher's config or tokenizer."""
NO_CHANGE: dict[str, Any] = {
    "output_dir": "elsewhere",
    "cache_dir": "stages-elsewhere",
    "seed": 4,
    "task.losses.alpha": 0.5,
    "task.losses.divergence.kind": "jsd",
    "task.losses.divergence.beta": 0.1,
    "task.losses.divergence.skew": 0.3,
    TEMPERATURE: 2.0,
    "task.losses.features.weight": 0.0,
    "student": {"num_layers": 1},
    "teacher.placement": "disk",
    "teacher.read_threads": 2,
    "data.split": "train-of-a-file",
    "cache.k": 4,
    "cache.samples": 4,
    "cache.shard_mib": 1,
    "train.batch_size": 2,
    "train.max_steps": 5,
    "train.ema_decay": 0.5,
    "optim.lr": 0.5,
    "evaluation.max_rows": 1,
}
"""Values of keys that a cache of hidden states does not depend on."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return language_folder(tmp_path_factory.mktemp("keys"))


def key_of(folder: Path, place: Path, changes: dict[str, Any]) -> dict[str, Any]:
    recipe = language_recipe(folder, place, {"cache_dir": str(place / "stages"), **changes})
    dtype = torch.bfloat16 if recipe.teacher.dtype == "bfloat16" else torch.float32
    return flatten(content_key(recipe, build_task(recipe), dtype))


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
    fields = keys({}).keys() | keys(SPARSE).keys()
    moved = {field for _, _, found in CHANGES for field in found}
    # All of a config is in the key, as one digest would be.
    assert {field for field in fields - moved - NEVER if not field.startswith("inputs.config.")} == set()
    assert moved <= fields


def test_every_key_of_the_recipe_that_moves_a_teacher_s_output_has_a_row():
    """And so do those that must not: of task, data and cache there are no others."""
    recipe_keys = keys_of(LanguageRecipe, ("seed", "task", "data", "cache"))
    rows = {key for change, _, _ in CHANGES if isinstance(change, dict) for key in change} | NO_CHANGE.keys()
    # Of the kind and what follows from the others: the documents themselves, which have rows above; features are more
    # outputs beside the same ones, which a cache is asked for by name.
    implied = {"task.kind", "data.kind", "task.trust_remote_code", "cache.draws"}
    implied |= {f"task.losses.features.{side}_blocks" for side in ("student", "teacher")}
    assert [key for key in recipe_keys if key not in rows | implied] == []


STAGE_CHANGES: list[tuple[Change, str | None]] = [
    (other_text, "data"),
    (one_more_text, "data"),
    (ANSWERS, "data"),
    ({"data.kind": "text", "data.path": "texts"}, "kind"),
    ({"data.kind": "datasets"}, "kind"),
    ({"data.max_samples": 9}, "max_samples"),
    (other_tokenizer, "tokenizer"),
    (other_template, "tokenizer"),
    # Rows are laid out of the same tokens.
    ({"data.max_length": 16}, None),
    ({"data.packing": True}, None),
    ({"data.held_out": 0.5}, None),
    ({"data.split": "unread"}, None),
    (other_weights, None),
    ({"seed": 4}, None),
]
"""What is changed, and the field of the stage's key that says so; None where the tokens are the same."""


@pytest.fixture(scope="module")
def stage(folder, tmp_path_factory) -> dict[str, dict[str, Any]]:
    return stages_of(folder, tmp_path_factory.mktemp("stage"), {})


def stages_of(folder: Path, place: Path, changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The key of each tokenised stage that a recipe makes, by its folder's name."""
    build_task(language_recipe(folder, place, {"cache_dir": str(place / "stages"), **changes}))
    return {file.parent.name: json.loads(file.read_text()) for file in place.glob("stages/*/key.json")}


@pytest.mark.parametrize(("change", "field"), STAGE_CHANGES, ids=[named(change) for change, _ in STAGE_CHANGES])
def test_what_changes_the_tokens_is_another_stage(folder, tmp_path, stage, change, field):
    files, changes = after(change, {}, folder, tmp_path)
    ((name, key),), ((other_name, other_key),) = stage.items(), stages_of(files, tmp_path, changes).items()
    assert (name != other_name) == (field is not None)
    assert field is None or field in changed(key, other_key)


def test_every_field_of_the_stage_s_key_has_a_row(stage):
    # A file read by `datasets` has a split; the format's number is that of the program's version of the stage.
    rows = {field for _, field in STAGE_CHANGES} | {"split", "format"}
    assert all(key.keys() <= rows for key in stage.values())


def test_another_split_of_a_data_set_is_another_stage(folder, tmp_path):
    data = {"data.kind": "datasets", "cache_dir": str(tmp_path / "stages")}
    saved = tmp_path / "saved"
    for split in ("train", "test"):
        (saved / split).mkdir(parents=True)
        shutil.copy(folder / "texts.jsonl", saved / split / "rows.jsonl")
    for split in ("train", "test"):
        build_task(language_recipe(folder, tmp_path, data | {"data.path": str(saved), "data.split": split}))
    keys = [json.loads(file.read_text()) for file in tmp_path.glob("stages/*/key.json")]
    assert len(keys) == 2
    assert changed(*keys) == {"split"}
