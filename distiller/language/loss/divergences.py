"""The divergences that `task.losses.divergence.kind` names, each a class of its own.

To add one: its class, its line in `DIVERGENCES`, and its name in `distiller.config.causal_lm.DivergenceKind`. Values,
gradients, chunks and the teacher's cached forms follow from `Divergence.terms`. p is the teacher's distribution, q the
student's.
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
    """A divergence before it is summed over outcomes, each [N, outcomes] float32."""

    values: Tensor
    """The summands."""

    slopes: Tensor
    """Their derivative by log q, up to a multiple of q (which the softmax's Jacobian takes out)."""


class Divergence(ABC):
    """A divergence of q from p as a sum over outcomes. Outcomes are the ids, or some ids and all others as one."""

    can_be_sampled: ClassVar[bool] = False
    """Whether ids drawn from p estimate it without bias: it is linear in p, apart from the entropy of p."""

    @classmethod
    @abstractmethod
    def of(cls, options: DivergenceLoss) -> Self:
        """With the recipe's options, of which it reads its own."""

    @abstractmethod
    def terms(self, log_p: Tensor, log_q: Tensor) -> Terms:
        """Both [N, outcomes] float32 log-probabilities."""


@final
@dataclass(frozen=True)
class ForwardKL(Divergence):
    """KL(p || q): the student covers all that the teacher does."""

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
    """KL(q || p): the student keeps to what the teacher finds likely."""

    @classmethod
    def of(cls, options: DivergenceLoss) -> Self:
        return cls()

    def terms(self, log_p: Tensor, log_q: Tensor) -> Terms:
        values = log_q.exp() * (log_q - log_p)
        return Terms(values, values)


@final
@dataclass(frozen=True)
class JensenShannon(Divergence):
    """Generalised: beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q.

    Agarwal et al. 2024, "On-policy distillation" (GKD), arXiv 2306.13649, section 2. It vanishes at both ends of beta;
    beta 0 and 1 give instead, as in TRL's GKD trainer, the limits of its ratios to beta and to 1 - beta: KL(p || q) and
    KL(q || p).

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
        # The slopes are exact: what q itself adds, (1 - beta) q, is what both halves lose through m.
        slopes = (1 - self.beta) * log_q.exp() * (log_q - log_m)
        return Terms(self.beta * log_p.exp() * (log_p - log_m) + slopes, slopes)


@dataclass(frozen=True)
class SkewedDivergence(Divergence):
    """A KL divergence from a mixture with a share `alpha` of its own first distribution.

    Ko et al. 2024 (DistiLLM), arXiv 2402.03898, section 3.1, which takes alpha = 0.1.

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
    """The divergence that a recipe names."""
    return DIVERGENCES[options.kind].of(options)


def _log_mixture(log_p: Tensor, log_q: Tensor, share: float) -> Tensor:
    """log(share p + (1 - share) q) for a share in (0, 1)."""
    return torch.logaddexp(math.log(share) + log_p, math.log1p(-share) + log_q)
