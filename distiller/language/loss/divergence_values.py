"""Value and gradient of a divergence, and of the cross-entropy, by the student's logits, token by token.

p is the teacher's distribution and q the student's, both softmax(logits / temperature). Everything is computed from
log-probabilities in float32, whatever the logits' dtype, so that values and gradients stay finite at any temperature.
Values and gradients carry the factor temperature^2, which keeps the gradient's size when the temperature changes
(Hinton et al. 2015, arXiv 1503.02531, section 2). Nothing here communicates or waits for a device. Values are also
differentiable by autograd; a loss over chunks of tokens needs the gradients written out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from distiller.errors import UserError
from distiller.language.loss.divergences import Divergence

LEAST_LOG = -1e30
"""Stands for log 0: finite, so that 0 * log 0 is 0. Masked ids (logits of -inf, or a dtype's least) get it."""


class SparseTarget(NamedTuple):
    """A teacher of which K ids a token are known, at the temperature that the loss uses.

    With `entropy` None the ids of a row are distinct, `weights` are their probabilities and `tail` the probability of
    all other ids together: the divergence is one between K + 1 outcomes, hence never negative, and 0 only where the
    student agrees on each of them.

    With `entropy` given the target is an estimate: `weights` are such that sum_k weights[k] log q(ids[k]) +
    tail log q(the other ids) has the expectation sum p log q. An id may come several times; `tail` is 0 where samples
    stand for everything, also beside exact top-k (each sample from outside the top k then weighs the outside's
    probability by their number; source: arXiv 2503.16870). Only a divergence with `can_be_sampled` is estimated without
    bias by this; its value may be negative. `entropy` of zeros, where it is unknown, makes the value a cross-entropy.
    """

    ids: Tensor
    """[N, K] int64, each below `vocabulary` and the student's vocabulary size."""

    weights: Tensor
    """[N, K] floating."""

    tail: Tensor
    """[N] floating."""

    entropy: Tensor | None = None
    """[N] floating: the teacher's, -sum p log p, in nats."""

    vocabulary: int | None = None
    """The ids that were compared, from the first; the student's softmax is over those of its own. None = over all."""

    def rows(self, rows: Tensor) -> SparseTarget:
        """Those of these indices [M] int64."""
        entropy = None if self.entropy is None else self.entropy[rows]
        return SparseTarget(self.ids[rows], self.weights[rows], self.tail[rows], entropy, self.vocabulary)


def dense_divergence(divergence: Divergence, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """The divergence of two sets of logits over the same ids, each [N, V], any floating dtype, on one device.

    Returns:
        [N] float32.
    """
    terms = divergence.terms(log_probabilities(teacher, temperature), log_probabilities(student, temperature))
    return temperature**2 * terms.values.sum(1)


def dense_divergence_and_gradient(
    divergence: Divergence, student: Tensor, teacher: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """As `dense_divergence`, and the gradient by the student's logits: [N] and [N, V], both float32."""
    log_q = log_probabilities(student, temperature)
    terms = divergence.terms(log_probabilities(teacher, temperature), log_q)
    gradient = terms.slopes - log_q.exp() * terms.slopes.sum(1, keepdim=True)
    return temperature**2 * terms.values.sum(1), temperature * gradient


def sparse_divergence(divergence: Divergence, student: Tensor, target: SparseTarget, temperature: float) -> Tensor:
    """The divergence from a teacher of which some ids are known.

    Args:
        student: logits [N, V] of the ids that are compared, any floating dtype, on the target's device.

    Returns:
        [N] float32.

    Raises:
        UserError: the target is an estimate and the divergence has not `can_be_sampled`.
    """
    log_q = log_probabilities(student, temperature)
    return temperature**2 * _sparse_terms(divergence, log_q, target).value


def sparse_divergence_and_gradient(
    divergence: Divergence, student: Tensor, target: SparseTarget, temperature: float
) -> tuple[Tensor, Tensor]:
    """As `sparse_divergence`, and the gradient by the student's logits: [N] and [N, V], both float32."""
    log_q = log_probabilities(student, temperature)
    value, slopes, log_outside, log_tail = _sparse_terms(divergence, log_q, target)
    # An id outside moves the tail's log-probability by its share of the tail.
    gradient = slopes[:, -1:] * (log_outside - log_tail).exp()
    gradient = gradient.scatter_add(1, target.ids, slopes[:, :-1]) - log_q.exp() * slopes.sum(1, keepdim=True)
    return temperature**2 * value, temperature * gradient


def cross_entropy(student: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(student)[label] at temperature 1.

    Args:
        student: logits [N, V], any floating dtype.
        labels: [N] int64, each in [0, V): ignored tokens are left out before.

    Returns:
        [N] float32.
    """
    # The label is looked up among the logits: looked up among log-probabilities, a compiler would store all of them.
    return student.float().logsumexp(1) - student.gather(1, labels[:, None]).squeeze(1).float()


def cross_entropy_gradient(student: Tensor, labels: Tensor) -> Tensor:
    """The gradient of `cross_entropy` by the logits: [N, V] float32."""
    is_label = torch.arange(student.shape[1], device=student.device) == labels[:, None]
    # Compared, not scattered: a compiler makes one pass of this.
    return student.float().softmax(1) - is_label.float()


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature), float32, at least about `LEAST_LOG`.

    The largest logit is subtracted before the division: at a low temperature the quotients are large, and what rounding
    them takes away is lost in their differences.

    Args:
        logits: [N, V], any floating dtype.
        temperature: positive.
    """
    logits = logits.float()
    distances = ((logits - logits.detach().amax(1, keepdim=True)) / temperature).clamp(min=LEAST_LOG)
    # The largest is 0 by now: the sum neither overflows nor vanishes.
    return distances - distances.exp().sum(1, keepdim=True).log()


class _Sparse(NamedTuple):
    value: Tensor
    slopes: Tensor
    """[N, K + 1]: the ids, and the tail."""
    log_outside: Tensor
    """[N, V]: log q, without the ids."""
    log_tail: Tensor
    """[N, 1]."""


def _sparse_terms(divergence: Divergence, log_q: Tensor, target: SparseTarget) -> _Sparse:
    # 1 - sum(q) of the ids would lose a small tail to rounding; a sum over the other ids does not.
    log_outside = log_q.scatter(1, target.ids, LEAST_LOG)
    log_tail = log_outside.logsumexp(1, keepdim=True)
    log_outcomes = torch.cat([log_q.gather(1, target.ids), log_tail], 1)
    weights = torch.cat([target.weights.float(), target.tail.float()[:, None]], 1)
    if target.entropy is None:
        log_weights = weights.clamp(min=torch.finfo(torch.float32).tiny).log()
        values, slopes = divergence.terms(log_weights, log_outcomes)
        # Rounding alone can take it below 0, where student and teacher agree.
        return _Sparse(values.sum(1).clamp(min=0), slopes, log_outside, log_tail)
    if not divergence.can_be_sampled:
        raise UserError(f"sampled teacher ids estimate the forward KL alone: {type(divergence).__name__} was asked for")
    value = -target.entropy.float() - (weights * log_outcomes).sum(1)
    return _Sparse(value, -weights, log_outside, log_tail)
