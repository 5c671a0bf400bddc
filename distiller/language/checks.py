"""What the recipe, the teacher and the student must agree on, checked by their descriptions (UserError)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distiller.config.causal_lm import LanguageData, LanguageLosses
from distiller.config.recipe import FeatureLoss
from distiller.errors import UserError
from distiller.language.data.batch import padded_length
from distiller.language.loss.divergences import divergence_of
from distiller.language.loss.token_losses import Objective
from distiller.language.model.spec import ModelSpec


def objective_of(losses: LanguageLosses) -> Objective:
    """What is summed over tokens, but for the features."""
    return Objective(divergence_of(losses.divergence), losses.divergence.temperature, losses.alpha)


def check_feature_blocks(features: FeatureLoss, teacher: ModelSpec, student: ModelSpec) -> None:
    """Matched blocks exist."""
    for key, numbers, count in (
        ("student_blocks", features.student_blocks, student.num_blocks),
        ("teacher_blocks", features.teacher_blocks, teacher.num_blocks),
    ):
        for number in numbers:
            if number >= count:
                raise UserError(
                    f"task.losses.features.{key} names block {number}; there are {count}, numbered from 0 to "
                    f"{count - 1}"
                )


def check_lengths(data: LanguageData, teacher: ModelSpec, student: ModelSpec) -> None:
    """Rows, padding included, are not longer than either model can read."""
    longest = padded_length(data.max_length)
    padding = f" ({longest} with padding)" if longest > data.max_length else ""
    for owner, anatomy in (("teacher", teacher), ("student", student)):
        limit = anatomy.max_positions
        if limit is not None and longest > limit:
            raise UserError(
                f"data.max_length is {data.max_length}{padding} and the {owner} reads at most {limit} tokens "
                "(max_position_embeddings); lower it"
            )
        changes_at = _changing_length(anatomy.config)
        if changes_at is not None and longest > changes_at:
            raise UserError(
                f"data.max_length is {data.max_length}{padding} and the {owner} turns its rotary positions another way "
                f"for all rows once one has more than {changes_at} tokens (original_max_position_embeddings); lower it"
            )


def tokenised_prompts(prompts: Sequence[str], tokenizer: Any, vocabulary: int) -> list[list[int]]:
    """The prompts' tokens. UserError for one without any, or with an id that is not below `vocabulary`."""
    rows = [list(tokenizer(prompt).input_ids) for prompt in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        if not row:
            raise UserError(f"the prompt {prompt!r} has no tokens; give at least one word")
        if max(row) >= vocabulary:
            raise UserError(
                f"the prompt {prompt!r} has the token id {max(row)}, and teacher and student have {vocabulary} ids in "
                "common; leave that token out"
            )
    return rows


def check_continuations(
    beginnings: Sequence[Sequence[int]], max_new_tokens: int, teacher: ModelSpec, student: ModelSpec
) -> None:
    """Both models can read every beginning with what they go on with."""
    longest = max(map(len, beginnings), default=0)
    for owner, anatomy in (("teacher", teacher), ("student", student)):
        limit = anatomy.max_positions
        if beginnings and limit is not None and padded_length(longest + max_new_tokens) > limit:
            raise UserError(
                f"evaluation.max_new_tokens is {max_new_tokens} after a prompt of {longest} tokens and the {owner} "
                f"reads at most {limit}, padding included (max_position_embeddings); lower it, or shorten the prompt"
            )


def _changing_length(config: Any) -> int | None:
    """The length above which rotary positions are scaled by the batch's longest row; None where they never are."""
    given = getattr(config, "rope_parameters", None) or {}
    # Of the whole model, or for each of its kinds of layers.
    for rope in (given, *(value for value in given.values() if isinstance(value, dict))):
        if rope.get("rope_type") in ("longrope", "dynamic"):
            limit = rope.get("original_max_position_embeddings")
            return limit or getattr(config, "original_max_position_embeddings", None)
    return None
