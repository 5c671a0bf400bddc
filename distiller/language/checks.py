"""Checks, before any weight is read, that recipe, teacher and student fit together; else raises UserError."""

from __future__ import annotations

from typing import Any

from distiller.config.causal_lm import LanguageData, LanguageLosses, LanguageRecipe
from distiller.config.recipe import FeatureLoss
from distiller.errors import UserError
from distiller.language.data.batch import padded_length
from distiller.language.loss.divergences import divergence_of
from distiller.language.loss.token_losses import Objective
from distiller.language.model.behaviour_probe import check_behaviour
from distiller.language.model.files import LanguageFiles
from distiller.language.model.spec import ModelSpec
from distiller.language.model.vocabulary import check_same_tokens
from distiller.language.student import StudentModel


def objective_of(losses: LanguageLosses) -> Objective:
    """The loss per token that a recipe asks for, without the feature loss."""
    return Objective(divergence_of(losses.divergence), losses.divergence.temperature, losses.alpha)


def check_models(recipe: LanguageRecipe, teacher: LanguageFiles, student: StudentModel) -> None:
    """Raises UserError unless both models can be trained and compared as the recipe says.

    Runs small models of the same kinds on the CPU. Does not communicate.
    """
    if student.files is not None:
        check_same_tokens(teacher, student.files)
    check_feature_blocks(recipe.task.losses.features, teacher.spec, student.spec)
    check_lengths(recipe.data, teacher.spec, student.spec)
    check_behaviour(teacher.spec, teacher.origin, recipe.data.packing)
    if not recipe.student.from_teacher:
        check_behaviour(student.spec, student.origin, recipe.data.packing)


def check_feature_blocks(features: FeatureLoss, teacher: ModelSpec, student: ModelSpec) -> None:
    """Raises UserError where the recipe matches a block index that the model does not have."""
    for key, indices, count in (
        ("student_blocks", features.student_blocks, student.num_blocks),
        ("teacher_blocks", features.teacher_blocks, teacher.num_blocks),
    ):
        for index in indices:
            if index >= count:
                raise UserError(
                    f"task.losses.features.{key} names block {index}; there are {count}, numbered from 0 to {count - 1}"
                )


def check_lengths(data: LanguageData, teacher: ModelSpec, student: ModelSpec) -> None:
    """Raises UserError unless both models can read rows of `data.max_length` tokens, rounded up by the padding.

    The rows must also stay within the length above which a model scales its rotary positions differently.
    """
    longest = padded_length(data.max_length)
    padding = f" ({longest} with padding)" if longest > data.max_length else ""
    for owner, spec in (("teacher", teacher), ("student", student)):
        limit = spec.max_positions
        if limit is not None and longest > limit:
            raise UserError(
                f"data.max_length is {data.max_length}{padding} and the {owner} reads at most {limit} tokens "
                "(max_position_embeddings); lower it"
            )
        changes_at = _changing_length(spec.config)
        if changes_at is not None and longest > changes_at:
            raise UserError(
                f"data.max_length is {data.max_length}{padding} and the {owner} turns its rotary positions another way "
                f"for all rows once one has more than {changes_at} tokens (original_max_position_embeddings); lower it"
            )


def _changing_length(config: Any) -> int | None:
    """The number of tokens above which a long row changes the rotary scaling of its whole batch; None if none does."""
    given = getattr(config, "rope_parameters", None) or {}
    # One dictionary for the whole model, or one for each layer type inside it.
    for rope in (given, *(value for value in given.values() if isinstance(value, dict))):
        if rope.get("rope_type") in ("longrope", "dynamic"):
            limit = rope.get("original_max_position_embeddings")
            return limit or getattr(config, "original_max_position_embeddings", None)
    return None
