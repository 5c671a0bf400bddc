"""Tokenizers with ids that a model has no place for, as those of Gemma 3 and of models with a padding token added."""

from __future__ import annotations

import json
import locale
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distiller.build import build_task
from distiller.config.loading import parse
from distiller.errors import UserError
from distiller.language import exporting
from tests import toy_causal_lm

IDS = toy_causal_lm.VOCABULARY


def tokenizer(padding: int = 0, **others: int) -> PreTrainedTokenizerFast:
    """The toy's, with further words at the given ids; `padding` is the id of its padding token."""
    words = (*toy_causal_lm.SPECIAL, *toy_causal_lm.WORDS)
    vocabulary = {word: number for number, word in enumerate(words)} | others
    if padding:
        vocabulary["[PAD]"] = padding
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    pad = "[PAD]" if padding else "<pad>"
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token=pad, eos_token="<eos>", unk_token="<unk>", bos_token="<eos>"
    )


def task_of(folder: Path, own: Any, students: Any = None, text: str = "the red cat", **sections: Any) -> Any:
    """A teacher of exactly the toy's ids with `own` tokenizer; the student is cut from it, or has one itself."""
    config = toy_causal_lm.llama_config(num_hidden_layers=1)
    toy_causal_lm.save_model(folder / "teacher", config, tokenizer=own)
    student: dict[str, Any] = {"num_layers": 1}
    if students is not None:
        toy_causal_lm.save_model(folder / "student", config, tokenizer=students)
        student = {"num_layers": None, "path": str(folder / "student")}
    sections = {"student": student} | sections
    (folder / "texts.jsonl").write_text("\n".join([json.dumps({"text": text})] * 20))
    recipe = toy_causal_lm.recipe(folder, folder / "teacher", cache_dir=str(folder / "c"), **sections)
    return build_task(parse(recipe))


@pytest.mark.parametrize("own", [{"image": IDS}, {"padding": IDS}, {"image": IDS + 4}])
def test_a_token_that_no_data_needs_is_left_out(tmp_path, own):
    task = task_of(tmp_path, tokenizer(**own))
    assert (task.network.ids.size, task.network.ids.absent) == (IDS, ())
    assert task._source.pad_id == ("padding" in own)
    (notice,) = [line for line in task.notices() if "left out" in line]
    assert f"with id {next(iter(own.values()))}" in notice
    rows = task._source.load()
    batch = task.collate([rows[0, number] for number in range(4)])
    assert int(batch.batch.input_ids.max()) < IDS


def test_a_token_that_only_the_student_has_is_left_out_too(tmp_path):
    file = toy_causal_lm.write_config(tmp_path / "s.json", toy_causal_lm.llama_config(vocab_size=IDS + 8))
    task = task_of(tmp_path, tokenizer(image=IDS), student={"num_layers": None, "config": str(file)})
    (notice,) = [line for line in task.notices() if "left out" in line]
    assert f"with id {IDS}" in notice


def test_a_token_that_the_data_needs_is_refused(tmp_path):
    with pytest.raises(UserError, match=f"document 1 holds the token id {IDS}, and .* have {IDS} ids in common"):
        task_of(tmp_path, tokenizer(image=IDS), text="the image")


def test_a_prompt_with_such_a_token_is_refused(tmp_path):
    with pytest.raises(UserError, match=f"'an? image' has the token id {IDS}"):
        task_of(tmp_path, tokenizer(image=IDS), evaluation={"sample_prompts": ["a image"]})


def test_a_prompt_with_a_token_that_only_the_teacher_has_is_refused(tmp_path):
    file = toy_causal_lm.write_config(tmp_path / "s.json", toy_causal_lm.llama_config(vocab_size=20))
    last = toy_causal_lm.WORDS[-1]
    with pytest.raises(UserError, match=f"{last}.* has the token id {IDS - 1}, and teacher and student have 20 ids"):
        task_of(
            tmp_path,
            tokenizer(),
            student={"num_layers": None, "config": str(file)},
            evaluation={"sample_prompts": [f"the {last}"]},
        )


def test_a_smaller_student_is_compared_over_its_ids(tmp_path):
    file = toy_causal_lm.write_config(tmp_path / "s.json", toy_causal_lm.llama_config(vocab_size=20))
    task = task_of(tmp_path, tokenizer(), student={"num_layers": None, "config": str(file)}, text="the red cat")
    assert task.network.ids.size == 20


def test_a_student_s_own_tokenizer_may_have_more_ids_than_the_student(tmp_path):
    """Also with ids between that stand for nothing, which the output layer does not have either."""
    task = task_of(tmp_path, tokenizer(), tokenizer(image=IDS + 4))
    assert task.notices() == [], "both read alike"
    stored = load_file(tmp_path / "student" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(task.build_student().model.lm_head.weight, stored)


def test_ids_of_another_tokenizer_that_is_not_exported_are_suppressed(tmp_path):
    """The student's own knows one more token and reads otherwise: what is exported is the teacher's."""
    config = toy_causal_lm.llama_config(num_hidden_layers=1, vocab_size=IDS + 1)
    teacher, students = tokenizer(), tokenizer(more=IDS)
    toy_causal_lm.save_model(tmp_path / "teacher", config, tokenizer=teacher)
    toy_causal_lm.save_model(tmp_path / "student", config, tokenizer=students)
    (tmp_path / "texts.jsonl").write_text("\n".join([json.dumps({"text": "a more"})] * 20))
    student = {"num_layers": None, "path": str(tmp_path / "student")}
    recipe = toy_causal_lm.recipe(tmp_path, tmp_path / "teacher", student=student, cache_dir=str(tmp_path / "c"))
    task = build_task(parse(recipe))
    model = task.build_student().model
    rows = model.lm_head.weight.detach()
    assert torch.allclose(rows[IDS], rows[:IDS].mean(0), atol=1e-6)
    task.export({f"model.{name}": value for name, value in model.state_dict().items()}, tmp_path / "exported")
    generation = json.loads((tmp_path / "exported" / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == [IDS]


def test_a_generation_config_is_read_as_utf_8_under_every_locale(tmp_path):
    file = tmp_path / "generation_config.json"
    file.write_text('{"note": "é"}', encoding="utf-8")
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        exporting._suppress(file, [IDS])
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    assert json.loads(file.read_text(encoding="utf-8")) == {"note": "é", "suppress_tokens": [IDS]}


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_without_an_output_layer_of_its_own_is_not_exported(tmp_path, tied):
    config = toy_causal_lm.llama_config(num_hidden_layers=1, tie_word_embeddings=tied)
    toy_causal_lm.save_model(tmp_path / "teacher", config)
    recipe = toy_causal_lm.recipe(
        tmp_path, tmp_path / "teacher", student={"num_layers": 1}, cache_dir=str(tmp_path / "c")
    )
    task = build_task(parse(recipe))
    state = {f"model.{name}": value for name, value in task.build_student().model.state_dict().items()}
    del state["model.lm_head.weight"]
    if tied:
        task.export(state, tmp_path / "exported")
        del state["model.model.embed_tokens.weight"]
    with pytest.raises(UserError, match="which lacks"):
        task.export(state, tmp_path / "refused")
