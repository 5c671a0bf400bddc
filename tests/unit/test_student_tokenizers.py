"""A student whose tokenizer reads the data otherwise than the teacher's: said, and exported with the teacher's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from distiller import commands
from distiller.build import build_task
from distiller.config.loading import parse
from distiller.errors import UserError
from distiller.language.data.documents import Document, Text
from distiller.language.model.files import find_model
from distiller.language.model.vocabulary import tokenizer_difference
from tests import toy_causal_lm

CHAT = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
OTHER_CHAT = CHAT.replace("m.role", "'the'").replace("assistant", "the")


def tokenizer(begins: bool = False, drops: int = 0, template: str | None = None) -> PreTrainedTokenizerFast:
    """The toy's, with <eos> in front, without its last words, or with a chat template."""
    words = toy_causal_lm.WORDS[: len(toy_causal_lm.WORDS) - drops]
    plain = toy_causal_lm.make_tokenizer(words)
    if begins:
        rules = processors.TemplateProcessing("<eos> $A", special_tokens=[("<eos>", 1)])
        plain.backend_tokenizer.post_processor = rules
    plain.chat_template = template
    return plain


@pytest.fixture
def task_of(tmp_path):
    def make(
        teachers: PreTrainedTokenizerFast, students: PreTrainedTokenizerFast, rows: list[Any] | None = None
    ) -> Any:
        folders = {"teacher": teachers, "student": students}
        for name, own in folders.items():
            config = toy_causal_lm.llama_config(num_hidden_layers=1)
            toy_causal_lm.save_model(tmp_path / name, config, tokenizer=own)
        if rows is not None:
            (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
        student = {"num_layers": None, "path": str(tmp_path / "student")}
        return parse(
            toy_causal_lm.recipe(
                tmp_path,
                tmp_path / "teacher",
                student=student,
                cache_dir=str(tmp_path / "cache"),
                train={"max_steps": 1},
            )
        )

    return make


CHATS = [{"messages": [{"role": "user", "content": "a cat"}, {"role": "assistant", "content": "a dog"}]}] * 40


@pytest.mark.parametrize(
    ("teachers", "students", "rows", "words"),
    [
        ({}, {"begins": True}, None, ["of", "line 1 it makes '<eos>' at token 1, where the teacher's makes"]),
        ({"begins": True}, {}, None, ["line 1 it makes", "at token 1, where the teacher's makes '<eos>'"]),
        ({}, {"drops": 2}, None, ["it lacks 2 of the teacher's tokens, the first 'then'"]),
        ({"template": CHAT}, {"template": OTHER_CHAT}, CHATS, ["line 1 it makes 'the' at token 1"]),
        ({"template": CHAT}, {}, CHATS, ["no chat template"]),
    ],
    ids=["begins", "does not begin", "words", "template", "no template"],
)
def test_another_reading_is_said_and_the_teachers_is_exported(task_of, teachers, students, rows, words, capsys):
    recipe = task_of(tokenizer(**teachers), tokenizer(**students), rows)
    commands.check(recipe, None)
    said = capsys.readouterr().out
    assert [word for word in ("its tokenizer reads the data otherwise", *words) if word not in said] == [], said
    commands.train(recipe, False)
    exported = AutoTokenizer.from_pretrained(Path(recipe.output_dir) / "student")
    theirs = tokenizer(**teachers)
    assert exported("the red cat").input_ids == theirs("the red cat").input_ids
    assert exported.chat_template == theirs.chat_template
    assert exported.get_vocab() == theirs.get_vocab()


def test_a_tokenizer_that_reads_alike_goes_with_its_student(task_of, tmp_path, capsys):
    """Its chat template is another one, and no document is a conversation."""
    recipe = task_of(tokenizer(), tokenizer(template=CHAT))
    assert build_task(recipe).notices() == []
    commands.train(recipe, False)
    assert AutoTokenizer.from_pretrained(Path(recipe.output_dir) / "student").chat_template == CHAT


def test_a_fault_of_the_data_is_no_difference_between_tokenizers(tmp_path):
    def documents() -> Iterator[Document]:
        yield Text("line 1", "the red cat")
        raise UserError("data.path: line 2 is not JSON")

    files = []
    for name, own in (("teacher", tokenizer()), ("student", tokenizer(template=CHAT))):
        toy_causal_lm.save_model(tmp_path / name, toy_causal_lm.llama_config(num_hidden_layers=1), tokenizer=own)
        files.append(find_model(name, str(tmp_path / name), None, None, tmp_path, trusts_code=False))
    with pytest.raises(UserError, match="line 2"):
        tokenizer_difference(*files, documents(), trusts_code=False)
