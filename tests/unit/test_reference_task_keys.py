"""Every key of the language and classification tasks' stages and caches; see tests/unit/test_reference_keys.py."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from distiller.classification_config import ClassificationRecipe
from distiller.config import Recipe
from distiller.language_config import LanguageRecipe
from tests import classifiers, toy_causal_lm
from tests.key_changes import Change, change_json, change_weights, differing, keys_of, leaves_of, parsed

CONSTANTS = {"format", "task.kind", "transformers", "dtype", "form.vocabulary"}
"""Fields that only another version of code, another task, or another tokenizer changes."""
OUTSIDE = ("output_dir", "cache_dir", "task.kind", "teacher", "optim", "checkpoint", "tracking", "evaluation")
"""Sections and keys that no key knows, but for those of `teacher` and `train` that rows name; the diffusion task's test
holds that."""
TRAINING = ("train.max_steps", "train.num_epochs", "train.batch_size", "train.gradient_accumulation_steps")
TRAINING += ("train.samples_per_update", "train.mixed_precision", "train.gradient_checkpointing", "train.compile")
TRAINING += ("train.ema_decay", "train.log_every", "train.num_workers")

TOPK, SAMPLED = {"cache.form": "topk"}, {"cache.form": "sampled"}
SETS = {"data.kind": "datasets", "data.path": "sets"}


def other_documents(folder: Path) -> None:
    lines = (folder / "texts.jsonl").read_text().splitlines()
    (folder / "texts.jsonl").write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n")


def config(folder: str, **values: Any) -> Callable[[Path], None]:
    return lambda root: change_json(root / folder / "config.json", **values)


def processor(folder: str) -> Callable[[Path], None]:
    return lambda root: change_json(root / folder / "preprocessor_config.json", image_std=[0.4] * 3)


def other_tokenizer(folder: Path) -> None:
    change_json(folder / "teacher" / "tokenizer_config.json", eos_token="cat")


LANGUAGE = [
    Change("nothing", ""),
    Change("seed", "", {"seed": 4}),
    Change("seed of draws", "content", {"seed": 4}, SAMPLED),
    Change("dtype", "content", {"teacher.dtype": "bfloat16"}),
    Change("quantization", "content", {"teacher.quantization": "int8"}),
    Change("tf32", "content", {"train.tf32": True}),
    Change("weights", "content", files=lambda folder: change_weights(folder / "teacher")),
    Change("config", "content", files=config("teacher", rms_norm_eps=1e-3)),
    Change("tokenizer", "tokens content", files=other_tokenizer),
    Change("documents", "tokens content", files=other_documents),
    Change("kind of data", "tokens", {"data.kind": "text", "data.path": "text"}),
    Change("split", "tokens content", {"data.split": "test"}, SETS),
    Change("fewer documents", "tokens content", {"data.max_samples": 20}),
    Change("length of rows", "content", {"data.max_length": 16}),
    Change("packing", "content", {"data.packing": True}),
    Change("held out", "content", {"data.held_out": 0.3}),
    Change("form", "content", TOPK),
    Change("likeliest ids", "content", {"cache.k": 5}, TOPK),
    Change("draws", "content", {"cache.samples": 5}, SAMPLED),
    Change("temperature of a form", "content", {"task.losses.divergence.temperature": 2.0}, TOPK),
    Change("unused draws", "", {"cache.samples": 5, "cache.k": 5}),
    Change("losses", "", {
        "task.losses.alpha": 0.5, "task.losses.divergence.kind": "jsd", "task.losses.divergence.temperature": 2.0,
        "task.losses.divergence.beta": 0.3, "task.losses.divergence.skew": 0.3, "task.losses.features.weight": 1.0,
        "task.losses.features.student_blocks": [0], "task.losses.features.teacher_blocks": [0],
        "task.trust_remote_code": False}),
    Change("student", "", {
        "student.num_layers": None, "student.hidden_size": 16, "student.num_attention_heads": 2,
        "student.num_key_value_heads": 1, "student.intermediate_size": 16}),
    Change("student's path", "", {"student.num_layers": None, "student.path": "teacher"}),
    Change("student's config", "", {"student.num_layers": None, "student.config": "small.json"}),
    Change("files of a cache", "", {"cache.draws": 1, "cache.shard_mib": 1}),
    Change("another path", "", {"teacher.path": "again", "data.path": "again/texts.jsonl"}),
]  # fmt: skip

CROPPED, TRAINED = {"data.augmentation": "crop"}, {"teacher.path": "untrained", "teacher_training.max_steps": 5}


def other_picture(folder: Path) -> None:
    with Image.open(folder / "pictures" / "cat" / "000.png") as picture:
        picture.transpose(Image.Transpose.ROTATE_90).save(folder / "pictures" / "cat" / "000.png")


def of_training(key: str, value: Any) -> Change:
    return Change(f"teacher's {key}", "teacher", {f"teacher_training.{key}": value}, TRAINED)


CLASSIFICATION = [
    Change("nothing", ""),
    Change("seed without draws", "", {"seed": 4}),
    Change("seed", "content", {"seed": 4}, CROPPED),
    Change("dtype", "content", {"teacher.dtype": "bfloat16"}),
    Change("quantization", "content", {"teacher.quantization": "int8"}),
    Change("tf32", "content", {"train.tf32": True}),
    Change("weights", "content weights", files=lambda folder: change_weights(folder / "teacher")),
    Change("config", "content weights", files=config("teacher", layer_norm_eps=1e-3)),
    Change("processor", "content", files=processor("teacher")),
    Change("a picture", "content", files=other_picture),
    Change("augmentation", "content", CROPPED),
    Change("flips", "content", {"data.augmentation": "crop-flip"}, CROPPED),
    Change("size of crops", "content", {"data.crop_scale": 0.8}, CROPPED),
    Change("size of no crops", "", {"data.crop_scale": 0.8}),
    Change("fewer pictures", "content", {"data.max_samples": 9}),
    Change("held out", "content", {"data.held_out": 0.5}),
    # The stage that trains a teacher.
    of_training("max_steps", 6),
    of_training("batch_size", 4),
    of_training("lr", 0.1),
    of_training("warmup_steps", 1),
    of_training("weight_decay", 0.2),
    of_training("label_smoothing", 0.1),
    of_training("augmentation", "none"),
    of_training("seed", 1),
    Change("crops of the teacher's", "teacher", {"data.crop_scale": 0.8}, TRAINED),
    Change("data of the teacher's", "teacher", {"data.held_out": 0.5}, TRAINED),
    Change("a picture of the teacher's", "teacher", given=TRAINED, files=other_picture),
    Change("config of the teacher's", "teacher", given=TRAINED, files=config("untrained", layer_norm_eps=1e-3)),
    Change("processor of the teacher's", "teacher", given=TRAINED, files=processor("untrained")),
    Change("student's data", "", {"data.max_samples": 9, "seed": 4, "data.augmentation": "crop"}, TRAINED),
    # What no key knows.
    Change("losses", "", {
        "task.losses.distillation.alpha": 0.2, "task.losses.distillation.temperature": 2.0,
        "task.losses.features.weight": 1.0, "task.losses.features.student_blocks": [0],
        "task.losses.features.teacher_blocks": [0], "task.channels_last": True}),
    Change("student", "", {"student.config": None, "student.num_layers": 2, "student.batch_norm": "frozen"}),
    Change("student's path", "", {"student.config": None, "student.path": "teacher"}),
    Change("files of a cache", "", {"cache.draws": 1, "cache.shard_mib": 1}),
    Change("another path", "", {"teacher.path": "again"}),
]  # fmt: skip
WITHOUT_ROWS = {
    "data.kind": "what is read counts",
    "data.path": "the same",
    "data.split": "datasets, whose fingerprint names it",
    "data.image_column": "the same",
    "data.label_column": "the same",
    "student.depths": "as num_layers",
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    """Teachers and data of all rows, of which each row changes a copy."""
    root = tmp_path_factory.mktemp("task-keys")
    (root / "language").mkdir()
    language = root / "language"
    for name in ("teacher", "again"):
        toy_causal_lm.save_model(language / name)
    toy_causal_lm.write_config(language / "small.json", toy_causal_lm.llama_config(num_hidden_layers=1))
    for name in (".", "again"):
        toy_causal_lm.write_texts(language / name / "texts.jsonl")
    (language / "text").mkdir()
    (language / "sets").mkdir()
    for number, line in enumerate((language / "texts.jsonl").read_text().splitlines()):
        (language / "text" / f"{number:02}.txt").write_text(json.loads(line)["text"])
    toy_causal_lm.write_texts(language / "sets" / "train.jsonl")
    toy_causal_lm.write_texts(language / "sets" / "test.jsonl", seed=6)

    vision = root / "vision"
    for name in ("teacher", "again", "untrained"):
        classifiers.save_classifier(vision / name, classifiers.vit_config())
    (vision / "untrained" / "model.safetensors").unlink()
    classifiers.vit_config(num_hidden_layers=1).to_json_file(vision / "student.json")
    classifiers.save_pictures(vision / "pictures")
    return root


def recipe_in(root: Path, keys: Mapping[str, Any]) -> Recipe:
    """Of the language task, or of classification, by the folder's name."""
    base: dict[str, Any] = {
        "output_dir": str(root / "run"),
        "seed": 3,
        "teacher.path": "teacher",
        "train.max_steps": 1,
        "train.batch_size": 1,
    }
    if root.name == "language":
        base |= {"task.kind": "causal_lm", "student.num_layers": 2, "data.kind": "jsonl", "data.path": "texts.jsonl"}
        base |= {"data.max_length": 32, "data.packing": False}
    else:
        base |= {"task.kind": "classification", "student.config": "student.json", "data.path": "pictures"}
    given = base | dict(keys)
    for key in ("teacher.path", "student.config", "student.path", "data.path"):
        if given.get(key) is not None:
            given[key] = str(root / given[key])
    return parsed({}, given)


@functools.cache
def changed_fields(originals: Path, change: Change) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """(key, field) of what differs, and of all fields."""
    trains = change.given.get("teacher.path") == "untrained"
    before, root = keys_of(recipe_in(originals, change.given), not trains), originals
    if change.files is not None:
        root = shutil.copytree(originals, originals.parent / change.name / originals.name)
        change.files(root)
    after = keys_of(recipe_in(root, {**change.given, **change.keys}), not trains)
    return differing(before, after), {(key, name) for key, fields in before.items() for name in fields}


TASKS = {"language": (LANGUAGE, LanguageRecipe), "vision": (CLASSIFICATION, ClassificationRecipe)}
FORMS = {"language": set(), "vision": {"form.kind"}}
KEYS = {"language": {"tokens", "content"}, "vision": {"teacher", "weights", "content"}}


@pytest.mark.parametrize(
    ("task", "change"),
    [(task, change) for task in TASKS for change in TASKS[task][0]],
    ids=lambda one: getattr(one, "name", one),
)
def test_a_change_shows_in_the_keys_of_what_depends_on_it(originals, task, change):
    found, _ = changed_fields(originals / task, change)
    assert {key for key, _ in found} == set(change.shown.split())


@pytest.mark.parametrize("task", TASKS)
def test_every_field_of_every_key_is_changed_by_a_row(originals, task):
    rows = TASKS[task][0]
    changed = {field for change in rows for field in changed_fields(originals / task, change)[0]}
    fields = {field for change in rows for field in changed_fields(originals / task, change)[1]}
    assert {key for key, _ in fields} == KEYS[task]
    assert sorted((key, name) for key, name in fields - changed if name not in CONSTANTS | FORMS[task]) == []


@pytest.mark.parametrize("task", TASKS)
def test_every_key_of_a_recipe_has_a_row(task):
    rows, recipe = TASKS[task]
    known = {key for change in rows for key in change.keys} | {*TRAINING, *WITHOUT_ROWS}
    missing = [leaf for leaf in leaves_of(recipe) if leaf not in known and not leaf.startswith(OUTSIDE)]
    assert sorted(missing) == []
