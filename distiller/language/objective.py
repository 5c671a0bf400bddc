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
from distiller.language import divergences
from distiller.language.divergences import Divergence, ForwardKL, SparseTarget


@final
@dataclass(frozen=True)
class Objective:
    """weight * temperature^2 * divergence + (1 - weight) * cross-entropy, summed over tokens.

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
) -> tuple[Tensor, Tensor | None]:
    """What happens between the products.

    Args:
        student: logits [C, V]. Rows that do not count may hold anything, here and below.
        teacher: logits [C, V''] with V'' <= V, or a sparse target of C rows.
        labels: [C] int64.
        counts: [C] bool.
        objective: what is summed.
        wants_gradient: whether to make it.
        gradient_scale: what the gradient is multiplied by before it is rounded.

    Returns:
        The sums [3] float32, and the gradient of the objective [C, V] in the student's dtype, or None.
    """
    weight, temperature = objective.weight, objective.temperature
    gradient = None
    if isinstance(teacher, SparseTarget):
        shared = student if teacher.vocabulary is None else student[:, : teacher.vocabulary]
        likeliest = teacher.ids.gather(1, teacher.weights.argmax(1, keepdim=True)).squeeze(1)
        compare, compare_with_gradient = divergences.sparse_divergence, divergences.sparse_divergence_and_gradient
    else:
        shared = student[:, : teacher.shape[1]]
        likeliest = teacher.argmax(1)
        compare, compare_with_gradient = divergences.dense_divergence, divergences.dense_divergence_and_gradient
    if wants_gradient and weight > 0:
        divergence, gradient = compare_with_gradient(objective.divergence, shared, teacher, temperature)
        gradient = F.pad(weight * gradient, (0, student.shape[1] - shared.shape[1]))
    else:
        divergence = compare(objective.divergence, shared, teacher, temperature)
    cross_entropy = divergences.cross_entropy(student, labels)
    if wants_gradient and weight < 1:
        by_labels = (1 - weight) * divergences.cross_entropy_gradient(student, labels)
        gradient = by_labels if gradient is None else gradient + by_labels
    agreeing = (shared.argmax(1) == likeliest).float()
    # Chosen, not multiplied: a row that does not count may hold NaN.
    sums = torch.stack([divergence, cross_entropy, agreeing]).masked_fill(~counts, 0).sum(1)
    return sums, None if gradient is None else (gradient_scale * gradient).to(student.dtype)


@functools.cache
def compiled_token_losses() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """`token_losses` compiled, whole or not at all: falling back to eager would take several times the memory."""
    return torch.compile(token_losses, fullgraph=True, dynamic=False)
