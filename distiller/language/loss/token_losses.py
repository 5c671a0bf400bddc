"""What is asked of a token's logits, and what happens to a chunk of them between the matrix products."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from distiller.errors import UserError, shown
from distiller.language.loss.divergence_values import (
    SparseTarget,
    cross_entropy_gradient,
    dense_divergence,
    dense_divergence_and_gradient,
    sparse_divergence,
    sparse_divergence_and_gradient,
)
from distiller.language.loss.divergences import Divergence, ForwardKL
from distiller.language.model.logits import PLAIN, LogitChange, without_absent


@final
@dataclass(frozen=True)
class Objective:
    """weight * temperature^2 * divergence + (1 - weight) * cross-entropy + unused, summed over tokens.

    `unused` is -log of the student's probability on ids that stand for a token: what keeps the others down.

    Raises:
        UserError: a temperature that is not positive and finite, a weight outside [0, 1].
    """

    divergence: Divergence = ForwardKL()  # noqa: RUF009 (frozen)
    temperature: float = 1.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise UserError(f"a temperature is a positive number: {shown(self.temperature)} was given")
        if not 0 <= self.weight <= 1:
            raise UserError(f"the weight of the divergence is in [0, 1]: {shown(self.weight)} was given")


def token_losses(
    student: Tensor,
    teacher: Tensor | SparseTarget,
    labels: Tensor,
    counts: Tensor,
    objective: Objective,
    wants_gradient: bool,
    gradient_scale: float,
    num_ids: int | None = None,
    absent: Tensor | None = None,
    student_change: LogitChange = PLAIN,
    teacher_change: LogitChange = PLAIN,
) -> tuple[Tensor, Tensor | None]:
    """What happens between the products.

    Args:
        student: the output layer's logits [C, V]. Rows that do not count may hold anything, here and below.
        teacher: logits [C, V''], of which the first V, or `num_ids`, are read; or a sparse target of C rows.
        labels: [C] int64.
        counts: [C] bool.
        objective: what is summed.
        wants_gradient: whether to make it.
        gradient_scale: what the gradient is multiplied by before it is rounded.
        num_ids: ids that stand for a token are below it, in both models. None = all do, and the divergence compares
            the first min(V, V''), the cross-entropy all V.
        absent: [num_ids] bool, true where an id below it stands for none; None = each stands for one.
        student_change, teacher_change: what the models do to these logits; a sparse target is made of changed ones.

    Returns:
        The sums [4] float32 (divergence, cross-entropy, agreeing tokens, unused), and the gradient of the objective by
        `student` [C, V] in its dtype, or None.
    """
    weight, temperature = objective.weight, objective.temperature
    changed, gradient = student_change.apply(student), None
    if isinstance(teacher, SparseTarget):
        shared = changed if teacher.vocabulary is None else changed[:, : teacher.vocabulary]
        likeliest = teacher.ids.gather(1, teacher.weights.argmax(1, keepdim=True)).squeeze(1)
        compare, compare_with_gradient = (
            sparse_divergence,
            sparse_divergence_and_gradient,
        )
    else:
        teacher = teacher[:, : student.shape[1] if num_ids is None else num_ids]
        teacher = without_absent(teacher_change.apply(teacher), absent)
        shared = changed[:, : teacher.shape[1]]
        likeliest = teacher.argmax(1)
        compare, compare_with_gradient = (
            dense_divergence,
            dense_divergence_and_gradient,
        )
    shared = without_absent(shared, absent)
    if wants_gradient and weight > 0:
        divergence, gradient = compare_with_gradient(objective.divergence, shared, teacher, temperature)
        gradient = _widened(weight * gradient, student)
    else:
        divergence = compare(objective.divergence, shared, teacher, temperature)
    sayable = changed if num_ids is None else shared
    # The label is looked up among what was given: looked up among what is computed, a compiler would store all of it.
    of_labels = student_change.apply(student.gather(1, labels[:, None]).squeeze(1)).float()
    cross_entropy = sayable.float().logsumexp(1) - of_labels
    if wants_gradient and weight < 1:
        by_labels = _widened((1 - weight) * cross_entropy_gradient(sayable, labels), student)
        gradient = by_labels if gradient is None else gradient + by_labels
    unused = torch.zeros_like(cross_entropy)
    if num_ids is not None and (num_ids < student.shape[1] or absent is not None):
        unused, by_unused = _unused(changed, sayable, num_ids, absent, wants_gradient)
        if by_unused is not None:
            gradient = by_unused if gradient is None else gradient + by_unused
    agreeing = (shared.argmax(1) == likeliest).float()
    # Chosen, not multiplied: a row that does not count may hold NaN.
    sums = torch.stack([divergence, cross_entropy, agreeing, unused]).masked_fill(~counts, 0).sum(1)
    if gradient is None:
        return sums, None
    if not student_change.is_plain:
        gradient = gradient * student_change.slope(changed)
    return sums, (gradient_scale * gradient).to(student.dtype)


def _unused(
    changed: Tensor, sayable: Tensor, num_ids: int, absent: Tensor | None, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """-log of the probability on ids of tokens [C], and its gradient by all logits [C, V], both float32.

    By the odds of the other ids, which are few: nothing small is the difference of two large numbers.

    Args:
        changed: logits [C, V].
        sayable: those of ids of tokens [C, num_ids], -inf where `absent`.
    """
    sayable = sayable.float()
    if absent is None:
        others, place = changed[:, num_ids:].float(), (num_ids, 0)
    else:
        is_other = F.pad(absent, (0, changed.shape[1] - num_ids), value=True)
        others, place = changed.float().masked_fill(~is_other, -torch.inf), (0, 0)
    log_odds = others.logsumexp(1) - sayable.logsumexp(1)
    if not wants_gradient:
        return F.softplus(log_odds), None
    share = log_odds.sigmoid()[:, None]
    return F.softplus(log_odds), F.pad(share * others.softmax(1), place) - _widened(share * sayable.softmax(1), changed)


def _widened(gradient: Tensor, student: Tensor) -> Tensor:
    """The gradient by the first ids, with zeros for the student's others."""
    return F.pad(gradient, (0, student.shape[1] - gradient.shape[1]))


@functools.cache
def compiled_token_losses() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """`token_losses` compiled, whole or not at all: falling back to eager would take several times the memory."""
    return torch.compile(token_losses, fullgraph=True, dynamic=False)
