"""Greedy generation by teacher and student from the same prompts, written side by side into a text file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from distiller.language.data.batch import IGNORED, LanguageBatch, TokenSample, collate
from distiller.language.model.logits import Head, TokenIds
from distiller.language.network import HIDDEN
from distiller.teachers.base import Request, Teacher

HiddenOf = Callable[[LanguageBatch], Tensor]
"""Maps a batch to the last hidden states [B, L, H] of a model."""


def generate_greedily(
    hidden_of: HiddenOf, head: Head, prompt_ids: Sequence[Sequence[int]], num_tokens: int, pad_id: int
) -> list[list[int]]:
    """Continues each prompt with the most likely next token, `num_tokens` times.

    Every step computes all positions again, since no placement of a teacher keeps a key-value cache: the time grows
    with the square of the length. There is no stop at the end-of-text token, so that all ranks run equally many
    forward passes; some placements communicate in each. Of a model that is at hand see `generate_with_cache`.

    Args:
        hidden_of: the model without output layer.
        head: the model's output layer, on the device of the hidden states.
        prompt_ids: token ids of each prompt, at least one.
        num_tokens: tokens to add to each prompt.
        pad_id: the token id in the padding.

    Returns:
        For each prompt the `num_tokens` ids that follow it.
    """
    rows = [list(prompt) for prompt in prompt_ids]
    for _ in range(num_tokens):
        hidden = hidden_of(as_batch(rows, pad_id).map(lambda tensor: tensor.to(head.weight.device)))
        last_positions = torch.tensor([len(row) - 1 for row in rows], device=hidden.device)
        logits = head.logits(hidden[torch.arange(len(rows), device=hidden.device), last_positions])
        for row, token in zip(rows, logits.argmax(1).tolist(), strict=True):
            row.append(token)
    return [row[len(prompt) :] for row, prompt in zip(rows, prompt_ids, strict=True)]


def generate_with_cache(
    model: Any, ids: TokenIds, prompt_ids: Sequence[Sequence[int]], num_tokens: int, pad_id: int
) -> list[list[int]]:
    """What `generate_greedily` returns, by the library's own `generate` and its key-value cache. Does not communicate.

    One prompt at a time, since prompts of several lengths would need padding in front.

    Args:
        model: a causal language model of transformers in eval mode. Its `generation_config` is replaced, whose file
            may ask for sampling or penalties.
        ids: the ids that stand for a token; others are not generated.
    """
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=num_tokens,
        suppress_tokens=ids.unused(model.get_output_embeddings().weight.shape[0]) or None,
        pad_token_id=pad_id,
    )
    continuations = []
    for prompt in prompt_ids:
        inputs = torch.tensor([list(prompt)], device=model.device)
        with torch.no_grad():
            generated = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs))
        continuations.append(generated[0, len(prompt) :].tolist())
    return continuations


def teacher_hidden_states(teacher: Teacher) -> HiddenOf:
    """Hidden states of a teacher in any placement. Communicates as the placement does: every rank must call it."""

    def hidden_of(batch: LanguageBatch) -> Tensor:
        inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
        return teacher.predict([Request(batch.sample_ids, inputs, (HIDDEN,))])[0][HIDDEN]

    return hidden_of


def model_hidden_states(model: Any) -> HiddenOf:
    """Hidden states of a model of transformers, without gradients."""

    def hidden_of(batch: LanguageBatch) -> Tensor:
        with torch.no_grad():
            body = model.base_model
            return body(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).last_hidden_state

    return hidden_of


def as_batch(rows: Sequence[Sequence[int]], pad_id: int) -> LanguageBatch:
    """A batch on the CPU of rows of token ids, whose labels are all IGNORED; sample ids are the row indices."""
    samples = [
        TokenSample(index, torch.tensor(row), torch.arange(len(row)), torch.full((len(row),), IGNORED))
        for index, row in enumerate(rows)
    ]
    return collate(samples, pad_id)


def write_texts(
    file: Path, tokenizer: Any, prompt_ids: Sequence[Sequence[int]], texts: Mapping[str, Sequence[Sequence[int]]]
) -> None:
    """Writes every prompt with what each model generated up to the end-of-text token, as UTF-8 text.

    Args:
        file: where to write.
        tokenizer: of transformers, for decoding.
        prompt_ids: token ids of each prompt.
        texts: model name -> generated token ids of each prompt, in the order of `prompt_ids`.
    """
    parts = []
    for index, prompt in enumerate(prompt_ids):
        lines = [f"prompt: {_one_line(tokenizer.decode(prompt))}"]
        for name, continuations in texts.items():
            tokens = list(continuations[index])
            if tokenizer.eos_token_id in tokens:
                tokens = tokens[: tokens.index(tokenizer.eos_token_id)]
            lines.append(f"{name}: {_one_line(tokenizer.decode(tokens))}")
        parts.append("\n".join(lines) + "\n")
    file.write_text("\n".join(parts), encoding="utf-8")


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")
