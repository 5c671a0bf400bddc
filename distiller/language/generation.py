"""Teacher and student continue the same beginnings, side by side in a text file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distiller.language.data.batch import IGNORED, LanguageBatch, TokenSample, collate
from distiller.language.model.logits import Head
from distiller.language.network import HIDDEN
from distiller.teachers.base import Request, Teacher

HiddenOf = Callable[[LanguageBatch], Tensor]
"""Last hidden states [B, L, H] of a batch."""


def continue_greedily(
    hidden_of: HiddenOf, head: Head, beginnings: Sequence[Sequence[int]], num_tokens: int, pad_id: int
) -> list[list[int]]:
    """The likeliest next token, `num_tokens` times: what each beginning goes on with.

    All positions are computed anew for every token, which no placement of a teacher has to keep a cache for: the time
    grows with the square of the length. Never stops early, so that ranks whose teacher communicates stay together.

    Args:
        head: on the device of the hidden states.
        beginnings: token ids, at least one each.
    """
    rows = [list(beginning) for beginning in beginnings]
    for _ in range(num_tokens):
        hidden = hidden_of(as_batch(rows, pad_id).map(lambda tensor: tensor.to(head.weight.device)))
        ends = torch.tensor([len(row) - 1 for row in rows], device=hidden.device)
        logits = head.logits(hidden[torch.arange(len(rows), device=hidden.device), ends])
        for row, token in zip(rows, logits.argmax(1).tolist(), strict=True):
            row.append(token)
    return [row[len(beginning) :] for row, beginning in zip(rows, beginnings, strict=True)]


def teachers_hidden(teacher: Teacher) -> HiddenOf:
    """The teacher, wherever it lives. Communicates as its placement does."""

    def hidden_of(batch: LanguageBatch) -> Tensor:
        inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
        return teacher.predict([Request(batch.sample_ids, inputs, (HIDDEN,))])[0][HIDDEN]

    return hidden_of


def students_hidden(model: Any) -> HiddenOf:
    """A model of the library."""

    def hidden_of(batch: LanguageBatch) -> Tensor:
        with torch.no_grad():
            body = model.base_model
            return body(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).last_hidden_state

    return hidden_of


def as_batch(rows: Sequence[Sequence[int]], pad_id: int) -> LanguageBatch:
    """Rows of token ids, of which nothing is learnt."""
    samples = [
        TokenSample(number, torch.tensor(row), torch.arange(len(row)), torch.full((len(row),), IGNORED))
        for number, row in enumerate(rows)
    ]
    return collate(samples, pad_id)


def write_texts(
    file: Path, tokenizer: Any, beginnings: Sequence[Sequence[int]], texts: Mapping[str, Sequence[Sequence[int]]]
) -> None:
    """Writes every beginning with what each model made of it, up to its end-of-text token; UTF-8."""
    parts = []
    for number, beginning in enumerate(beginnings):
        lines = [f"prompt: {_one_line(tokenizer.decode(beginning))}"]
        for name, continuations in texts.items():
            tokens = list(continuations[number])
            if tokenizer.eos_token_id in tokens:
                tokens = tokens[: tokens.index(tokenizer.eos_token_id)]
            lines.append(f"{name}: {_one_line(tokenizer.decode(tokens))}")
        parts.append("\n".join(lines) + "\n")
    file.write_text("\n".join(parts), encoding="utf-8")


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")
