"""What the recipe, the teacher and the student must agree on, checked by their descriptions (UserError)."""

from __future__ import annotations

from distiller.errors import UserError
from distiller.language.anatomy import Anatomy
from distiller.language.divergences import (
    Divergence,
    ForwardKL,
    JensenShannon,
    ReverseKL,
    SkewedKL,
    SkewedReverseKL,
)
from distiller.language.objective import Objective
from distiller.language_config import DivergenceLoss, LanguageData, LanguageFeatureLoss, LanguageLosses


def objective_of(losses: LanguageLosses) -> Objective:
    """What is summed over tokens, but for the features."""
    return Objective(divergence_of(losses.divergence), losses.divergence.temperature, losses.alpha)


def divergence_of(loss: DivergenceLoss) -> Divergence:
    """The divergence that a recipe names."""
    if loss.kind == "jsd":
        return JensenShannon(loss.beta)
    if loss.kind == "skewed_kl":
        return SkewedKL(loss.skew)
    if loss.kind == "skewed_reverse_kl":
        return SkewedReverseKL(loss.skew)
    return ForwardKL() if loss.kind == "forward_kl" else ReverseKL()


def check_feature_blocks(features: LanguageFeatureLoss, teacher: Anatomy, student: Anatomy) -> None:
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


def check_lengths(data: LanguageData, teacher: Anatomy, student: Anatomy) -> None:
    """Rows are not longer than either model can read."""
    for owner, anatomy in (("teacher", teacher), ("student", student)):
        limit = anatomy.max_positions
        if limit is not None and data.max_length > limit:
            raise UserError(
                f"data.max_length is {data.max_length} and the {owner} reads at most {limit} tokens "
                "(max_position_embeddings); lower it"
            )
