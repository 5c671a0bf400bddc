"""Divergence and cross-entropy of each token, and their gradients by the student's logits.

p is the teacher's distribution and q the student's, both softmax(logits / temperature). Everything is computed from
log-probabilities in float32, whatever the logits' dtype, so that values and gradients stay finite at any temperature.
A divergence carries the factor temperature^2, which keeps the size of its gradient when the temperature changes (Hinton
et al. 2015, arXiv 1503.02531, section 2). Nothing here communicates or waits for a device. Autograd can differentiate
the values too; the explicit gradients are for the chunked loss, which needs them in its forward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from distiller.errors import UserError
from distiller.language.loss.divergences import Divergence

MIN_LOG = -1e30
"""Used for log 0: finite, so that 0 * log 0 is 0 and not NaN. Ids with a logit of -inf or a dtype's lowest get it."""


class SparseTarget(NamedTuple):
    """A teacher's distribution of which K ids per token are known, at the temperature that the loss uses.

    Without `entropy` the target is exact: the ids of a row are distinct, `weights` are their probabilities, and `tail`
    is the probability of all other ids together. The divergence compares K + 1 outcomes. It is never negative, and 0
    only where the student gives each outcome the teacher's probability.

    With `entropy` the target is an estimate from samples: the sum over k of weights[k] log q(ids[k]), plus tail times
    log q(all other ids), has the expectation sum p log q. An id may occur several times. `tail` is 0 where samples
    represent all ids, or all ids outside of an exact top k; each sample from outside the top k then has the weight
    (probability outside the top k) / (number of samples); source: arXiv 2503.16870. Only a divergence with
    `can_be_sampled` is estimated without bias, and its value may be negative. Where the entropy is unknown, zeros may
    be given: the value is then the cross-entropy -sum p log q.
    """

    ids: Tensor
    """[N, K] int64, each below `vocabulary` and the student's vocabulary size."""

    weights: Tensor
    """[N, K], any floating dtype."""

    tail: Tensor
    """[N], any floating dtype."""

    entropy: Tensor | None = None
    """[N], any floating dtype: -sum p log p of the teacher's distribution, in nats."""

    vocabulary: int | None = None
    """The target's distribution is over the ids below this number, and the student's softmax over those of them that it
    has. None = over all ids of the student."""

    def rows(self, rows: Tensor) -> SparseTarget:
        """The target of the tokens at these indices [M] int64."""
        entropy = None if self.entropy is None else self.entropy[rows]
        return SparseTarget(self.ids[rows], self.weights[rows], self.tail[rows], entropy, self.vocabulary)


def dense_divergence(divergence: Divergence, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """The divergence of each token, times temperature^2.

    Args:
        student, teacher: logits [N, V] over the same ids, any floating dtype, on one device.
        temperature: positive.

    Returns:
        [N] float32.
    """
    terms = divergence.terms(log_probabilities(teacher, temperature), log_probabilities(student, temperature))
    return temperature**2 * terms.values.sum(1)


def dense_divergence_and_gradient(
    divergence: Divergence, student: Tensor, teacher: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """`dense_divergence` [N], and its gradient by the student's logits [N, V]; both float32."""
    log_q = log_probabilities(student, temperature)
    terms = divergence.terms(log_probabilities(teacher, temperature), log_q)
    gradient = terms.slopes - log_q.exp() * terms.slopes.sum(1, keepdim=True)
    return temperature**2 * terms.values.sum(1), temperature * gradient


def sparse_divergence(divergence: Divergence, student: Tensor, target: SparseTarget, temperature: float) -> Tensor:
    """The divergence of each token, times temperature^2, from a teacher of which some ids are known.

    Args:
        student: logits [N, V] of the ids that are compared, any floating dtype, on the target's device.
        temperature: positive; the one at which the target was made.

    Returns:
        [N] float32.

    Raises:
        UserError: the target is an estimate and `divergence.can_be_sampled` is false.
    """
    log_q = log_probabilities(student, temperature)
    return temperature**2 * _sparse_terms(divergence, log_q, target).value


def sparse_divergence_and_gradient(
    divergence: Divergence, student: Tensor, target: SparseTarget, temperature: float
) -> tuple[Tensor, Tensor]:
    """`sparse_divergence` [N], and its gradient by the student's logits [N, V]; both float32."""
    log_q = log_probabilities(student, temperature)
    value, slopes, log_outside, log_tail = _sparse_terms(divergence, log_q, target)
    # The derivative of the tail's log-probability by the logit of an id in the tail is that id's share of the tail.
    gradient = slopes[:, -1:] * (log_outside - log_tail).exp()
    gradient = gradient.scatter_add(1, target.ids, slopes[:, :-1]) - log_q.exp() * slopes.sum(1, keepdim=True)
    return temperature**2 * value, temperature * gradient


def cross_entropy(student: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(student)[label] at temperature 1.

    Args:
        student: logits [N, V], any floating dtype.
        labels: [N] int64, each in [0, V); the caller leaves out ignored tokens.

    Returns:
        [N] float32.
    """
    # gather reads the logits: if it read log-probabilities, torch.compile would write all of them to memory.
    return student.float().logsumexp(1) - student.gather(1, labels[:, None]).squeeze(1).float()


def cross_entropy_gradient(student: Tensor, labels: Tensor) -> Tensor:
    """The gradient of `cross_entropy` by the logits: [N, V] float32."""
    is_label = torch.arange(student.shape[1], device=student.device) == labels[:, None]
    # A comparison instead of a scatter: torch.compile fuses it with the softmax into one pass.
    return student.float().softmax(1) - is_label.float()


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) [N, V] in float32; the lowest values are about `MIN_LOG`.

    The largest logit is subtracted before the division. At a low temperature the quotients are large, and their
    rounding errors would be large compared with their differences.

    Args:
        logits: [N, V], any floating dtype.
        temperature: positive.
    """
    logits = logits.float()
    shifted = ((logits - logits.detach().amax(1, keepdim=True)) / temperature).clamp(min=MIN_LOG)
    # The largest value in a row is 0, so the sum is between 1 and V.
    return shifted - shifted.exp().sum(1, keepdim=True).log()


class _Sparse(NamedTuple):
    """What value and gradient of a sparse divergence share; float32, without the factor temperature^2."""

    value: Tensor
    """[N]."""

    slopes: Tensor
    """[N, K + 1]: see `Terms.slopes`; of the target's ids, then of the tail."""

    log_outside: Tensor
    """[N, V]: log q, with `MIN_LOG` at the target's ids."""

    log_tail: Tensor
    """[N, 1]: log of the student's probability of all ids that are not the target's."""


def _sparse_terms(divergence: Divergence, log_q: Tensor, target: SparseTarget) -> _Sparse:
    # The tail is summed over the other ids: 1 - sum(q) over the target's ids would lose a small tail to rounding.
    log_outside = log_q.scatter(1, target.ids, MIN_LOG)
    log_tail = log_outside.logsumexp(1, keepdim=True)
    log_outcomes = torch.cat([log_q.gather(1, target.ids), log_tail], 1)
    weights = torch.cat([target.weights.float(), target.tail.float()[:, None]], 1)
    if target.entropy is None:
        log_weights = weights.clamp(min=torch.finfo(torch.float32).tiny).log()
        values, slopes = divergence.terms(log_weights, log_outcomes)
        # Where student and teacher agree, rounding can make the sum slightly negative.
        return _Sparse(values.sum(1).clamp(min=0), slopes, log_outside, log_tail)
    if not divergence.can_be_sampled:
        raise UserError(f"sampled teacher ids estimate the forward KL alone: {type(divergence).__name__} was asked for")
    value = -target.entropy.float() - (weights * log_outcomes).sum(1)
    return _Sparse(value, -weights, log_outside, log_tail)
