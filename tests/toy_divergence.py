"""A divergence as somebody adds one: a class in a file of its own, and one entry in `DIVERGENCES`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, final

from torch import Tensor

from distiller.config.causal_lm import DivergenceLoss
from distiller.language.loss.divergences import Divergence, Terms


@final
@dataclass(frozen=True)
class SquaredHellinger(Divergence):
    """The sum of (sqrt p - sqrt q)^2."""

    @classmethod
    def of(cls, options: DivergenceLoss) -> Self:
        return cls()

    def terms(self, log_p: Tensor, log_q: Tensor) -> Terms:
        p, q, both = log_p.exp(), log_q.exp(), ((log_p + log_q) / 2).exp()
        return Terms(p + q - 2 * both, -both)
