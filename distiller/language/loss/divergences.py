"""The divergences that `task.losses.divergence.kind` names, each a class of its own.

To add one, write its class, and add it to `DIVERGENCES` and to `distiller.config.causal_lm.DivergenceKind` (if it has
`can_be_sampled`, also to `SAMPLED_KINDS` there). Values, gradients, the chunked loss and the losses from a cache are
all computed from `Divergence.terms`. p is the teacher's distribution, q the student's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self, final

import torch
from torch import Tensor

from distiller.config.causal_lm import DivergenceKind, DivergenceLoss
from distiller.errors import UserError, shown


class Terms(NamedTuple):
    """The summands of a divergence, one per outcome, and their derivatives; each [N, outcomes] float32."""

    values: Tensor
    """The summands."""

    slopes: Tensor
    """The derivative of each summand by its log q. A multiple of q, with one factor per row, may be left out: the
    gradient by the student's logits does not depend on it, since the softmax's Jacobian removes it."""


class Divergence(ABC):
    """A divergence between p and q that is a sum over outcomes.

    The outcomes are all ids, or some ids and one outcome for all other ids together (the tail).
    """

    can_be_sampled: ClassVar[bool] = False
    """Whether ids drawn from p give an unbiased estimate: apart from p's entropy, the divergence is linear in p."""

    @classmethod
    @abstractmethod
    def of(cls, options: DivergenceLoss) -> Self:
        """Builds the divergence from those of the recipe's options that it uses."""

    @abstractmethod
    def terms(self, log_p: Tensor, log_q: Tensor) -> Terms:
        """The summands and derivatives, from log-probabilities [N, outcomes] float32 on one device."""


@final
@dataclass(frozen=True)
class ForwardKL(Divergence):
    """KL(p || q): large where the student gives little probability to what the teacher finds likely."""

    can_be_sampled = True

    @classmethod
    def of(cls, options: DivergenceLoss) -> Self:
        return cls()

    def terms(self, log_p: Tensor, log_q: Tensor) -> Terms:
        p = log_p.exp()
        return Terms(p * (log_p - log_q), -p)


@final
@dataclass(frozen=True)
class ReverseKL(Divergence):
    """KL(q || p): large where the student gives probability to what the teacher finds unlikely."""

    @classmethod
    def of(cls, options: DivergenceLoss) -> Self:
        return cls()

    def terms(self, log_p: Tensor, log_q: Tensor) -> Terms:
        values = log_q.exp() * (log_q - log_p)
        return Terms(values, values)


@final
@dataclass(frozen=True)
class JensenShannon(Divergence):
    """Generalised Jensen-Shannon: beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q.

    Source: Agarwal et al. 2024, "On-policy distillation" (GKD), arXiv 2306.13649, section 2. The formula is 0 for beta
    0 and beta 1. As in TRL's GKD trainer, beta 0 gives KL(p || q), the limit of the formula divided by beta, and beta 1
    gives KL(q || p), the limit of the formula divided by 1 - beta.

    Raises:
        UserError: beta is not in [0, 1].
    """

    beta: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise UserError(f"beta of a Jensen-Shannon divergence is in [0, 1]: {shown(self.beta)} was given")

    @classmethod
    def of(cls, options: DivergenceLoss) -> Self:
        return cls(options.beta)

    def terms(self, log_p: Tensor, log_q: Tensor) -> Terms:
        if self.beta == 0:
            return ForwardKL().terms(log_p, log_q)
        if self.beta == 1:
            return ReverseKL().terms(log_p, log_q)
        log_m = _log_mixture(log_p, log_q, self.beta)
        # These slopes are exact: the derivative of (1 - beta) q log q has a further term (1 - beta) q, and the
        # derivatives of the terms with log m sum to -(1 - beta) q.
        slopes = (1 - self.beta) * log_q.exp() * (log_q - log_m)
        return Terms(self.beta * log_p.exp() * (log_p - log_m) + slopes, slopes)


@dataclass(frozen=True)
class SkewedDivergence(Divergence):
    """KL(a || alpha a + (1 - alpha) b): the second distribution is a mixture that holds a share `alpha` of the first.

    Source: Ko et al. 2024 (DistiLLM), arXiv 2402.03898, section 3.1, which uses alpha = 0.1.

    Raises:
        UserError: alpha is not in [0, 1).
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise UserError(
                f"alpha of a skewed KL is in [0, 1), where 1 would compare nothing: {shown(self.alpha)} was given"
            )

    @final
    @classmethod
    def of(cls, options: DivergenceLoss) -> Self:
        return cls(options.skew)


@final
@dataclass(frozen=True)
class SkewedKL(SkewedDivergence):
    """KL(p || alpha p + (1 - alpha) q): forward KL whose gradient is bounded where q is small."""

    def terms(self, log_p: Tensor, log_q: Tensor) -> Terms:
        if self.alpha == 0:
            return ForwardKL().terms(log_p, log_q)
        log_m = _log_mixture(log_p, log_q, self.alpha)
        p = log_p.exp()
        return Terms(p * (log_p - log_m), -p * (math.log1p(-self.alpha) + log_q - log_m).exp())


@final
@dataclass(frozen=True)
class SkewedReverseKL(SkewedDivergence):
    """KL(q || alpha q + (1 - alpha) p): reverse KL that stays bounded where p is small."""

    def terms(self, log_p: Tensor, log_q: Tensor) -> Terms:
        if self.alpha == 0:
            return ReverseKL().terms(log_p, log_q)
        log_m = _log_mixture(log_p, log_q, 1 - self.alpha)
        q = log_q.exp()
        values = q * (log_q - log_m)
        return Terms(values, values - q * (math.log(self.alpha) + log_q - log_m).exp())


DIVERGENCES: dict[DivergenceKind, type[Divergence]] = {
    "forward_kl": ForwardKL,
    "reverse_kl": ReverseKL,
    "jsd": JensenShannon,
    "skewed_kl": SkewedKL,
    "skewed_reverse_kl": SkewedReverseKL,
}


def divergence_of(options: DivergenceLoss) -> Divergence:
    """Builds the divergence that a recipe names, with its options."""
    return DIVERGENCES[options.kind].of(options)


def _log_mixture(log_p: Tensor, log_q: Tensor, share: float) -> Tensor:
    """log(share p + (1 - share) q) for a share in (0, 1)."""
    return torch.logaddexp(math.log(share) + log_p, math.log1p(-share) + log_q)
