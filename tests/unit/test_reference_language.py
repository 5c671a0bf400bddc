"""Task `causal_lm` beside a plain loop (`tests.plain_language`): every key of the recipe that moves its numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PhiConfig

from distiller.build import build_task
from distiller.caching import make_cache
from distiller.errors import UserError
from distiller.language_config import LanguageRecipe
from distiller.recipe_file import parse
from distiller.teachers.opening import open_alone
from tests import toy_causal_lm, toys
from tests.beside_plain import (
    assert_named_tests_exist,
    assert_same,
    forget_accelerate,
    keys_of,
    merged,
    nested,
    run,
)
from tests.plain_language import train_plainly

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, Any] = {
    "teacher": toy_causal_lm.llama_config(**SMALL, num_hidden_layers=3),
    "untied": toy_causal_lm.llama_config(**SMALL, num_hidden_layers=2, tie_word_embeddings=False),
    # Its output layer has a bias.
    "phi": PhiConfig(
        vocab_size=toy_causal_lm.VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        partial_rotary_factor=1.0,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=1,
        initializer_range=0.3,
    ),
}
DROPOUT = toy_causal_lm.llama_config(**SMALL | {"hidden_size": 8}, num_hidden_layers=2, attention_dropout=0.5)
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "skewed_kl", "skewed_reverse_kl")
LOSSES = "task.losses."
DIVERGENCE = f"{LOSSES}divergence."
FEATURES = f"{LOSSES}features."
PAIR = {f"{FEATURES}weight": 0.5, f"{FEATURES}student_blocks": [1], f"{FEATURES}teacher_blocks": [2]}
PAIRS = {f"{FEATURES}weight": 2.0, f"{FEATURES}student_blocks": [0, 1], f"{FEATURES}teacher_blocks": [2, 1]}
MIXED = {f"{LOSSES}alpha": 0.7, **PAIRS}
CACHED = {"teacher.placement": "cached"}

ROWS: dict[str, list[dict[str, Any]]] = {
    "seed": [{"seed": 0, "student": {"config": "student.json"}, **PAIR}],
    "task.losses.alpha": [{f"{LOSSES}alpha": alpha} for alpha in (0.0, 0.3, 1.0)],
    "task.losses.divergence.kind": [{f"{DIVERGENCE}kind": kind} for kind in DIVERGENCES],
    "task.losses.divergence.temperature": [
        {f"{DIVERGENCE}kind": kind, f"{DIVERGENCE}temperature": temperature, f"{LOSSES}alpha": 0.5}
        for kind in DIVERGENCES
        for temperature in (0.5, 3.0)
    ],
    "task.losses.divergence.beta": [
        {f"{DIVERGENCE}kind": "jsd", f"{DIVERGENCE}beta": beta, f"{DIVERGENCE}temperature": 2.0}
        for beta in (0.0, 0.2, 1.0)
    ],
    "task.losses.divergence.skew": [
        {f"{DIVERGENCE}kind": kind, f"{DIVERGENCE}skew": skew, f"{DIVERGENCE}temperature": 2.0}
        for kind in ("skewed_kl", "skewed_reverse_kl")
        for skew in (0.0, 0.3)
    ],
    "task.losses.features.weight": [PAIR, {**PAIR, f"{FEATURES}weight": 3.0, f"{LOSSES}alpha": 0.0}],
    "task.losses.features.student_blocks": [PAIRS],
    "task.losses.features.teacher_blocks": [{**PAIRS, f"{FEATURES}teacher_blocks": [0, 2]}],
    "student.config": [{"student": {"config": name}} for name in ("student.json", "phi.json", "dropout.json")],
    "student.path": [{"student": {"path": name}} for name in ("untied", "phi")],
    "student.num_layers": [{"student": {"num_layers": count}, f"{LOSSES}alpha": 0.5} for count in (1, 3)],
    "student.hidden_size": [{"student": {"hidden_size": 12, "num_layers": 3}}],
    "student.num_attention_heads": [{"student": {"num_attention_heads": 2}}],
    "student.num_key_value_heads": [{"student": {"num_key_value_heads": 1}}],
    "student.intermediate_size": [{"student": {"intermediate_size": 20}}],
    "data.kind": [{"data.kind": "text", "data.path": "texts"}],
    "data.path": [{"data.path": "answers.jsonl"}],
    "data.max_samples": [{"data.max_samples": 25}],
    "data.max_length": [
        {"data.path": path, "data.max_length": 11, "data.packing": packing}
        for path in ("texts.jsonl", "answers.jsonl")
        for packing in (False, True)
    ],
    "data.packing": [{"data.path": path, "data.packing": True} for path in ("texts.jsonl", "answers.jsonl")],
    "data.held_out": [{"data.held_out": share} for share in (0.3, 0.0)],
    "cache.form": [
        {**CACHED, **MIXED, "cache.form": form, f"{DIVERGENCE}temperature": 2.0, "data.packing": packing}
        for form, packing in (("hidden", False), ("topk", True), ("sampled", False), ("topk+sampled", True))
    ],
    "cache.k": [
        *({**CACHED, "cache.form": "topk", "cache.k": 5, f"{DIVERGENCE}kind": kind} for kind in DIVERGENCES),
        *({**CACHED, "cache.form": form, "cache.k": 1} for form in ("topk", "topk+sampled")),
    ],
    "cache.samples": [{**CACHED, "cache.form": form, "cache.samples": 4} for form in ("sampled", "topk+sampled")],
    # These change no number.
    "cache.shard_mib": [{**CACHED, "cache.shard_mib": 1}],
    "train.batch_size": [{"train.batch_size": 2, "train.samples_per_update": 4, **MIXED}],
    "train.gradient_accumulation_steps": [
        {"train.batch_size": 2, "train.gradient_accumulation_steps": 2, "data.packing": True, **MIXED}
    ],
    "train.gradient_checkpointing": [{"train.gradient_checkpointing": True, **MIXED}],
}
ELSEWHERE = {
    "task.kind": "tests/unit/test_reference_language.py::test_the_product_is_the_plain_loop",
    "task.trust_remote_code": "tests/unit/test_language_student.py::test_code_of_a_models_folder_runs_where_it_is_trusted",
    "cache.draws": "tests/unit/test_reference_language.py::test_a_text_has_no_draws_to_repeat",
    "data.split": "tests/unit/test_language_data_reading.py::test_data_sets_are_read_as_files_and_as_folders",
}
"""Where a key is held that no plain loop can show."""
SECTIONS = ("seed", "task", "student", "data", "cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Models, configs and texts. Every weight of the models differs from its first value, biases and norms too."""
    root = tmp_path_factory.mktemp("reference-language")
    for number, (name, config) in enumerate(MODELS.items()):
        save_moved(root / name, config, seed=number)
    toy_causal_lm.write_config(root / "student.json", toy_causal_lm.llama_config(**SMALL | {"hidden_size": 8}))
    toy_causal_lm.write_config(root / "phi.json", MODELS["phi"])
    toy_causal_lm.write_config(root / "dropout.json", DROPOUT)
    texts = [json.loads(line)["text"] for line in toy_causal_lm.write_texts(root / "texts.jsonl").read_text().splitlines()]
    (root / "texts").mkdir()
    for number, text in enumerate(texts):
        (root / "texts" / f"{number:03}.txt").write_text(text)
    # Prompts of 1 to 14 words, of which some fill a row of 11 tokens.
    words = [text.split() for text in texts]
    answers = [(of[: len(of) // 2 or 1], of[len(of) // 2 or 1 :]) for of in words]
    lines = [json.dumps({"prompt": " ".join(one), "completion": " " + " ".join(two)}) for one, two in answers if two]
    (root / "answers.jsonl").write_text("\n".join(lines))
    return root


def save_moved(place: Path, config: Any, seed: int) -> None:
    toy_causal_lm.save_model(place, config, seed)
    model = AutoModelForCausalLM.from_pretrained(place)
    generator = torch.Generator().manual_seed(100 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(place)


def recipe_of(folder: Path, place: Path, changes: dict[str, Any]) -> LanguageRecipe:
    """The row's recipe; names of files are those in `folder`."""
    base = {
        "output_dir": str(place / "run"),
        "cache_dir": str(folder / "stages"),
        "seed": 3,
        "task": {"kind": "causal_lm"},
        "teacher": {"path": str(folder / "teacher")},
        "student": {"num_layers": 2},
        "data": {"kind": "jsonl", "path": "texts.jsonl", "max_length": 32, "packing": False},
        "train": {"max_steps": 2, "batch_size": 4, "log_every": 1},
        "optim": {"lr": 1e-2, "max_grad_norm": 1.0, "eps": 1e-6},
        "checkpoint": {"at_end": False},
    }
    data = merged(base, nested({key: value for key, value in changes.items() if key != "student"}))
    data["student"] = changes.get("student", data["student"])
    for section, key in (("data", "path"), ("student", "config"), ("student", "path"), ("teacher", "path")):
        if key in data[section]:
            data[section][key] = str(folder / data[section][key])
    if data["teacher"].get("placement") == "cached":
        data["teacher"]["cache"] = str(place / "outputs")
    recipe = parse(data)
    assert isinstance(recipe, LanguageRecipe)
    return recipe


@pytest.mark.parametrize(
    "changes", [pytest.param(row, id=f"{key}-{number}") for key, rows in ROWS.items() for number, row in enumerate(rows)]
)
def test_the_product_is_the_plain_loop(folder, tmp_path, changes):
    recipe = recipe_of(folder, tmp_path, changes)
    if recipe.teacher.placement == "cached":
        make_cache(recipe)
        forget_accelerate()
    assert_same(run(recipe), *train_plainly(recipe))


def test_every_key_has_a_row():
    keys = keys_of(LanguageRecipe, SECTIONS)
    held = ROWS.keys() | ELSEWHERE.keys()
    assert [key for key in keys if key not in held] == []
    # The others are those of `train`, most of which `test_reference_training` holds.
    assert {key for key in held if key not in keys and not key.startswith("train.")} == set()
    assert_named_tests_exist(ELSEWHERE.values())


def test_a_text_has_no_draws_to_repeat(folder, tmp_path):
    recipe = recipe_of(folder, tmp_path, {**CACHED, "cache.draws": 2})
    with pytest.raises(UserError, match="cache.draws is 2 and this task asks the teacher the same in every epoch"):
        make_cache(recipe)


def test_the_head_s_bias_of_the_student_is_trained(folder, tmp_path):
    """Phi's: dropped, the loss would be another one, and nothing would move it."""
    recipe = recipe_of(folder, tmp_path, {"student": {"path": "phi"}})
    ours, (theirs, first) = run(recipe), train_plainly(recipe)
    name = "model.lm_head.bias"
    assert first[name].abs().min() > 0
    assert (theirs.weights[name] - first[name]).abs().max() > 1e-3
    torch.testing.assert_close(ours.weights[name], theirs.weights[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("student", ["student.json", "phi.json"])
def test_the_teacher_runs_outside_of_the_caller_s_autocast(folder, tmp_path, student):
    """Its states and its logits: in bfloat16 the student alone is rounded."""
    recipe = recipe_of(folder, tmp_path, {"student": {"config": student}, "train.mixed_precision": "bf16"})
    exact, _ = train_plainly(recipe)
    ours = run(recipe)
    assert [line["loss"] for line in ours.metrics] == pytest.approx(exact.losses, rel=2e-2)
    task = build_task(recipe)
    data = task.run_stages(toys.ALONE, None)
    batch = task.collate([data[0, number] for number in range(3)])
    teacher = open_alone(task.network, recipe.teacher, torch.float32, torch.device("cpu"))
    request, answers, losses = task.request(batch), [], []
    trained = task.build_student().requires_grad_(False)
    for is_on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            answers.append(teacher.predict([request])[0])
    teacher.close()
    assert all(torch.equal(plain, cast) for plain, cast in zip(*(of.values() for of in answers), strict=True))
