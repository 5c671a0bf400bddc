"""The objective of the loss, and the losses and logit gradients of a chunk of tokens from the chunk's logits."""

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
from distiller.tasks.gpu_kernels import is_planned, one_kernel_on_gpu


@final
@dataclass(frozen=True)
class Objective:
    """weight * temperature^2 * divergence + (1 - weight) * cross-entropy + unused, summed over tokens.

    `unused` is -log of the student's total probability on ids that stand for a token. It keeps the probability of the
    other ids low, and is 0 where every id stands for a token.

    Raises:
        UserError: a temperature that is not positive and finite, or a weight outside [0, 1].
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
    """Sums of the losses over a chunk of C tokens, and the gradient of the objective by the student's logits.

    Runs between the chunk's matrix products. All tensors are on one device; nothing communicates.

    Args:
        student: the output layer's logits [C, V], any floating dtype. Rows that do not count may hold any values, NaN
            included, here and in `teacher`.
        teacher: logits [C, V'], any floating dtype, of which the first `num_ids` are read (without `num_ids`, the first
            V); or a sparse target of C rows.
        labels: [C] int64, each in [0, V), also in rows that do not count.
        counts: [C] bool: which rows count.
        objective: what is computed for each token.
        wants_gradient: whether the gradient is computed.
        gradient_scale: factor of the gradient, applied in float32 before the cast to the dtype of `student`.
        num_ids: the ids that stand for a token are below this number, and both models have them; every softmax is then
            over them. None = every id stands for a token: the divergence compares the first min(V, V') ids, and the
            cross-entropy is over all V.
        absent: [num_ids] bool, true where an id below `num_ids` stands for no token; None = each stands for one.
        student_change, teacher_change: the scale and cap that the models apply to these logits. A sparse target is made
            from logits that are already changed.

    Returns:
        The sums [4] float32 (divergence, cross-entropy, agreeing tokens, unused), and the gradient [C, V] in the dtype
        of `student`, or None without `wants_gradient`.

    Raises:
        UserError: the target is an estimate and `objective.divergence.can_be_sampled` is false.
    """
    weight, temperature = objective.weight, objective.temperature
    changed, gradient = student_change.apply(student), None
    if isinstance(teacher, SparseTarget):
        shared = changed if teacher.vocabulary is None else changed[:, : teacher.vocabulary]
        likeliest = teacher.ids.gather(1, teacher.weights.argmax(1, keepdim=True)).squeeze(1)
    else:
        teacher = teacher[:, : student.shape[1] if num_ids is None else num_ids]
        teacher = without_absent(teacher_change.apply(teacher), absent)
        shared = changed[:, : teacher.shape[1]]
        likeliest = teacher.argmax(1)
    shared = without_absent(shared, absent)
    if wants_gradient and weight > 0:
        divergence, gradient = _divergence_and_gradient(objective.divergence, shared, teacher, temperature)
        gradient = _widened(weight * gradient, student)
    else:
        divergence = _divergence(objective.divergence, shared, teacher, temperature)
    token_logits = changed if num_ids is None else shared
    # gather reads the given logits, and the change is applied to its result: if gather read the changed logits,
    # torch.compile would write all of them to memory.
    label_logits = student_change.apply(student.gather(1, labels[:, None]).squeeze(1)).float()
    cross_entropy = token_logits.float().logsumexp(1) - label_logits
    if wants_gradient and weight < 1:
        label_gradient = _widened((1 - weight) * cross_entropy_gradient(token_logits, labels), student)
        gradient = label_gradient if gradient is None else gradient + label_gradient
    unused = torch.zeros_like(cross_entropy)
    if num_ids is not None and (num_ids < student.shape[1] or absent is not None):
        unused, unused_gradient = _unused(changed, token_logits, num_ids, absent, wants_gradient)
        if unused_gradient is not None:
            gradient = unused_gradient if gradient is None else gradient + unused_gradient
    agreeing = (shared.argmax(1) == likeliest).float()
    # Not a product with the mask: a row that does not count may hold NaN, and NaN * 0 is NaN.
    sums = torch.stack([divergence, cross_entropy, agreeing, unused]).masked_fill(~counts, 0).sum(1)
    if gradient is None:
        return sums, None
    if not student_change.is_plain:
        gradient = gradient * student_change.slope(changed)
    return sums, (gradient_scale * gradient).to(student.dtype)


def _divergence(divergence: Divergence, student: Tensor, teacher: Tensor | SparseTarget, temperature: float) -> Tensor:
    """The divergence of each token [C] from a dense or a sparse target."""
    if isinstance(teacher, SparseTarget):
        return sparse_divergence(divergence, student, teacher, temperature)
    return dense_divergence(divergence, student, teacher, temperature)


def _divergence_and_gradient(
    divergence: Divergence, student: Tensor, teacher: Tensor | SparseTarget, temperature: float
) -> tuple[Tensor, Tensor]:
    """`_divergence` [C], and its gradient by the logits `student`."""
    if isinstance(teacher, SparseTarget):
        return sparse_divergence_and_gradient(divergence, student, teacher, temperature)
    return dense_divergence_and_gradient(divergence, student, teacher, temperature)


def _unused(
    changed: Tensor, token_logits: Tensor, num_ids: int, absent: Tensor | None, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """-log of the probability on ids of tokens [C], and its gradient by all changed logits [C, V]; both float32.

    Computed as log(1 + odds), where odds is the probability of the other ids divided by that of the tokens' ids. Both
    are sums, so a small result is not the difference of two large numbers.

    Args:
        changed: logits [C, V] after the student's scale and cap.
        token_logits: the logits of the ids of tokens [C, num_ids], -inf where `absent`.

    Returns:
        The gradient is None without `wants_gradient`.
    """
    token_logits = token_logits.float()
    if absent is None:
        other_logits, padding = changed[:, num_ids:].float(), (num_ids, 0)
    else:
        is_other = F.pad(absent, (0, changed.shape[1] - num_ids), value=True)
        other_logits, padding = changed.float().masked_fill(~is_other, -torch.inf), (0, 0)
    log_odds = other_logits.logsumexp(1) - token_logits.logsumexp(1)
    if not wants_gradient:
        return F.softplus(log_odds), None
    other_probability = log_odds.sigmoid()[:, None]
    return F.softplus(log_odds), F.pad(other_probability * other_logits.softmax(1), padding) - _widened(
        other_probability * token_logits.softmax(1), changed
    )


def _widened(gradient: Tensor, student: Tensor) -> Tensor:
    """A gradient [C, ids] by the first ids, with zeros for the student's other ids: [C, V]."""
    return F.pad(gradient, (0, student.shape[1] - gradient.shape[1]))


def compiled_token_losses() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """`token_losses` compiled as one graph. A graph break is an error: eager mode needs several times the memory."""
    return one_kernel_on_gpu(token_losses) if is_planned() else _compiled_token_losses()


@functools.cache
def _compiled_token_losses() -> Callable[..., tuple[Tensor, Tensor | None]]:
    return torch.compile(token_losses, fullgraph=True, dynamic=False)
