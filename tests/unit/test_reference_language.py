"""Task `causal_lm` beside a plain loop (`tests.plain_language`): every key of the recipe that moves its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distiller.build import build_task
from distiller.commands.caching import make_cache
from distiller.config.causal_lm import CUTS, LanguageRecipe
from distiller.errors import UserError
from distiller.teachers.factory import open_alone
from tests import toys
from tests.beside_plain import (
    assert_named_tests_exist,
    assert_same,
    changes_key,
    forget_accelerate,
    keys_of,
    run,
    unique_rows,
)
from tests.plain_language import train_plainly
from tests.reference_cases import language_folder, language_recipe

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "skewed_kl", "skewed_reverse_kl")
LOSSES = "task.losses."
DIVERGENCE = f"{LOSSES}divergence."
FEATURES = f"{LOSSES}features."
PAIR = {f"{FEATURES}weight": 0.5, f"{FEATURES}student_blocks": [1], f"{FEATURES}teacher_blocks": [2]}
PAIRS = {f"{FEATURES}weight": 2.0, f"{FEATURES}student_blocks": [0, 1], f"{FEATURES}teacher_blocks": [2, 1]}
MIXED = {f"{LOSSES}alpha": 0.7, **PAIRS}
CACHED = {"teacher.placement": "cached"}

# Rows change several keys at once where one run can show both.
STUDENTS = [
    {f"{DIVERGENCE}kind": kind, "student": student}
    for kind, student in zip(
        DIVERGENCES,
        (
            {"config": "student.json"},
            {"config": "phi.json"},
            {"config": "dropout.json"},
            {"path": "untied"},
            {"path": "phi"},
        ),
        strict=True,
    )
]
SMALLER = [
    {f"{LOSSES}alpha": 0.0, "student": {"num_layers": 3}},
    {f"{LOSSES}alpha": 0.3, "student": {"num_layers": 1}},
    {f"{LOSSES}alpha": 1.0, "student": {"hidden_size": 12, "num_layers": 3}},
    {**PAIR, "student": {"num_attention_heads": 2}},
    {**PAIR, f"{FEATURES}weight": 3.0, f"{LOSSES}alpha": 0.0, "student": {"num_key_value_heads": 1}},
    {**PAIRS, "student": {"intermediate_size": 20}},
]
DATA = [
    {f"{DIVERGENCE}kind": kind, f"{DIVERGENCE}temperature": temperature, f"{LOSSES}alpha": 0.5, **data}
    for kind, temperature, data in zip(
        (*DIVERGENCES, "forward_kl"),
        (3.0, 3.0, 3.0, 3.0, 3.0, 0.5),
        (
            {"data.kind": "text", "data.path": "texts"},
            {"data.kind": "datasets"},
            {"data.path": "answers.jsonl"},
            {"data.max_samples": 25},
            {"data.held_out": 0.3},
            {"data.held_out": 0.0},
        ),
        strict=True,
    )
]
PACKED = [
    {f"{DIVERGENCE}temperature": 2.0, "data.path": path, "data.packing": packing, "data.max_length": length, **loss}
    for (path, packing, length), loss in zip(
        (
            ("texts.jsonl", False, 11),
            ("texts.jsonl", True, 11),
            ("answers.jsonl", False, 11),
            ("answers.jsonl", True, 11),
            ("texts.jsonl", True, 32),
            ("answers.jsonl", True, 32),
        ),
        (
            *({f"{DIVERGENCE}kind": "jsd", f"{DIVERGENCE}beta": beta} for beta in (0.0, 0.2, 1.0)),
            {f"{DIVERGENCE}kind": "skewed_kl", f"{DIVERGENCE}skew": 0.3},
            {f"{DIVERGENCE}kind": "skewed_reverse_kl", f"{DIVERGENCE}skew": 0.3},
            {f"{DIVERGENCE}kind": "skewed_kl", f"{DIVERGENCE}skew": 0.0},
        ),
        strict=True,
    )
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "seed": [{"seed": 0, "student": {"config": "student.json"}, **PAIR}],
    "task.losses.alpha": SMALLER,
    "task.losses.divergence.kind": STUDENTS,
    "task.losses.divergence.temperature": DATA,
    "task.losses.divergence.beta": PACKED,
    "task.losses.divergence.skew": PACKED,
    "task.losses.features.weight": SMALLER,
    "task.losses.features.student_blocks": SMALLER,
    "task.losses.features.teacher_blocks": [{**PAIRS, f"{FEATURES}teacher_blocks": [0, 2]}],
    **{f"student.{key}": STUDENTS for key in ("config", "path")},
    **{f"student.{key}": SMALLER for key in CUTS},
    **{f"data.{key}": DATA for key in ("kind", "path", "max_samples", "held_out")},
    **{f"data.{key}": PACKED for key in ("max_length", "packing")},
    "cache.form": [
        {**CACHED, **MIXED, "cache.form": form, f"{DIVERGENCE}temperature": 2.0, "data.packing": packing}
        for form, packing in (("hidden", False), ("topk", True), ("sampled", False), ("topk+sampled", True))
    ],
    "cache.k": [{**CACHED, "cache.form": "topk", "cache.k": 5, f"{DIVERGENCE}kind": kind} for kind in DIVERGENCES[1:]],
    "cache.samples": [{**CACHED, "cache.form": "topk+sampled", "cache.samples": 4, "cache.k": 1}],
    # These change no number.
    "cache.shard_mib": [{**CACHED, "cache.shard_mib": 1, "train.num_workers": 1}],
    "train.batch_size": [{"train.batch_size": 2, "train.samples_per_update": 4, **MIXED}],
    "train.gradient_accumulation_steps": [
        {"train.batch_size": 2, "train.gradient_accumulation_steps": 2, "data.packing": True, **MIXED}
    ],
    "train.gradient_checkpointing": [{"train.gradient_checkpointing": True, **MIXED}],
}
STUDENT_TESTS, DATA_TESTS = "tests/unit/test_language_student.py", "tests/unit/test_language_data_reading.py"
ELSEWHERE = {
    "task.kind": "tests/unit/test_reference_language.py::test_the_product_is_the_plain_loop",
    "task.trust_remote_code": f"{STUDENT_TESTS}::test_code_of_a_models_folder_runs_where_it_is_trusted",
    "cache.draws": "tests/unit/test_reference_language.py::test_a_text_has_no_draws_to_repeat",
    "data.split": f"{DATA_TESTS}::test_data_sets_are_read_as_files_and_as_folders",
}
"""Where a key is held that no plain loop can show."""
SECTIONS = ("seed", "task", "student", "data", "cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return language_folder(tmp_path_factory.mktemp("language"))


@pytest.mark.parametrize("changes", unique_rows(ROWS))
def test_the_product_is_the_plain_loop(folder, tmp_path, changes):
    recipe = language_recipe(folder, tmp_path, changes)
    if recipe.teacher.placement == "cached":
        make_cache(recipe)
        forget_accelerate()
    # The loss from stored ids is a difference of sums that are ten times as large: the last bits differ between CPUs.
    tolerance = 6e-5 if recipe.teacher.placement == "cached" else 2e-5
    assert_same(run(recipe), *train_plainly(recipe), tolerance=tolerance)


def test_every_key_has_a_row_that_changes_it():
    assert [key for key, rows in ROWS.items() if not any(changes_key(row, key) for row in rows)] == []
    keys = keys_of(LanguageRecipe, SECTIONS)
    held = ROWS.keys() | ELSEWHERE.keys()
    assert [key for key in keys if key not in held] == []
    # The others are those of `train`, most of which `test_reference_training` holds.
    assert {key for key in held if key not in keys and not key.startswith("train.")} == set()
    assert_named_tests_exist(ELSEWHERE.values())


def test_a_text_has_no_draws_to_repeat(folder, tmp_path):
    recipe = language_recipe(folder, tmp_path, {**CACHED, "cache.draws": 2})
    with pytest.raises(UserError, match=r"cache\.draws is 2 and this task asks the teacher the same in every epoch"):
        make_cache(recipe)


def test_the_head_s_bias_of_the_student_is_trained(folder, tmp_path):
    """Phi's: dropped, the loss would be another one, and nothing would move it."""
    recipe = language_recipe(folder, tmp_path, {"student": {"path": "phi"}})
    ours, (theirs, first) = run(recipe), train_plainly(recipe)
    name = "model.lm_head.bias"
    assert first[name].abs().min() > 0
    assert (theirs.weights[name] - first[name]).abs().max() > 1e-3
    torch.testing.assert_close(ours.weights[name], theirs.weights[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("student", ["student.json", "phi.json"])
def test_the_teacher_runs_outside_of_the_caller_s_autocast(folder, tmp_path, student):
    """Its states and its logits: in bfloat16 the student alone is rounded."""
    recipe = language_recipe(folder, tmp_path, {"student": {"config": student}, "train.mixed_precision": "bf16"})
    exact, _ = train_plainly(recipe)
    ours = run(recipe)
    assert [line["loss"] for line in ours.metrics] == pytest.approx(exact.losses, rel=2e-2)
    task = build_task(recipe)
    data = task.load_data(toys.ALONE, None)
    batch = task.collate([data[0, number] for number in range(3)])
    teacher = open_alone(task.network, recipe, torch.float32, torch.device("cpu"))
    request, answers = task.request(batch), []
    for is_on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            answers.append(teacher.predict([request])[0])
    teacher.close()
    assert all(torch.equal(plain, cast) for plain, cast in zip(*(of.values() for of in answers), strict=True))
