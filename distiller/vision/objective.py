"""The losses of a distilled classifier, in float32; `distiller.config.classification_losses` names them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from distiller.config.classification import ClassificationLosses
from distiller.config.classification_losses import LOSSES, DistillationLoss
from distiller.config.recipe import FeatureLoss
from distiller.distributed.importing import import_object
from distiller.tasks.base import LossSum
from distiller.tasks.feature_matching import feature_loss
from distiller.teachers.base import Outputs
from distiller.vision.network import FEATURES, LOGITS


@dataclass(frozen=True)
class Compared:
    """What a loss compares: of one micro-batch of B pictures, on one device, in any floating dtype.

    Attributes:
        logits: the student's [B, classes].
        features: the student's projected block outputs, in the order of `task.losses.features`.
        labels: [B] int64.
        teacher: the teacher's outputs by name; empty where no loss reads any.
    """

    logits: Tensor
    features: Sequence[Tensor]
    labels: Tensor
    teacher: Outputs


class Term(NamedTuple):
    """A term of the loss: `value` is its sum over the pictures, a float32 scalar, logged as `loss/NAME` unweighted."""

    name: str
    weight: float
    value: Tensor


class ClassifierLoss(ABC):
    """A loss of the registry, built with its section of the recipe; its concrete classes are final."""

    @property
    @abstractmethod
    def wanted(self) -> tuple[str, ...]:
        """The names of the teacher's outputs (see `ClassifierNetwork`) that `terms` reads; empty where it is off."""

    @abstractmethod
    def terms(self, compared: Compared) -> list[Term]:
        """Its terms, the same ones in every update; none where it is off."""


@final
class Distillation(ClassifierLoss):
    """`distillation`: the divergence from the teacher, and the cross-entropy with the labels."""

    def __init__(self, options: DistillationLoss) -> None:
        self._options = options

    @property
    def wanted(self) -> tuple[str, ...]:
        return (LOGITS,) if self._options.alpha else ()

    def terms(self, compared: Compared) -> list[Term]:
        alpha = self._options.alpha
        terms = [Term("labels", 1 - alpha, cross_entropy(compared.logits, compared.labels).sum())]
        if alpha:
            values = tempered_divergence(compared.logits, compared.teacher[LOGITS], self._options.temperature)
            terms.append(Term("distillation", alpha, values.sum()))
        return terms


@final
class FeatureMatching(ClassifierLoss):
    """`features`: the squared error of block outputs."""

    def __init__(self, options: FeatureLoss) -> None:
        self._weight = options.weight
        self._names = tuple(f"{FEATURES}{block}" for block in options.teacher_blocks if options.weight)

    @property
    def wanted(self) -> tuple[str, ...]:
        return self._names

    def terms(self, compared: Compared) -> list[Term]:
        if not self._weight:
            return []
        return [Term("features", self._weight, feature_loss(compared.features, compared.teacher, self._names))]


@final
class Objective:
    """All losses of a recipe.

    Attributes:
        wanted: the names of the teacher's outputs that they read, each once.
    """

    def __init__(self, losses: ClassificationLosses) -> None:
        self._losses: list[ClassifierLoss] = [
            import_object(spec.loss_class)(getattr(losses, name)) for name, spec in LOSSES.items()
        ]
        self.wanted = tuple(dict.fromkeys(name for loss in self._losses for name in loss.wanted))

    def loss(self, compared: Compared) -> LossSum:
        """The weighted sum of all terms."""
        terms = [term for loss in self._losses for term in loss.terms(compared)]
        total = compared.logits.new_zeros((), dtype=torch.float32)
        for term in terms:
            total = total + term.weight * term.value
        return LossSum(total, {term.name: term.value.detach() for term in terms})


def tempered_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 x KL(softmax(teacher / T) || softmax(student / T)), as in Hinton, Vinyals and Dean (2015), section 2.

    T^2 keeps the size of the gradient as T grows. Computed from log-probabilities, in float32.

    Args:
        student, teacher: logits [B, classes], any floating dtype, on one device.
        temperature: T, positive.

    Returns:
        [B] float32, not negative except for rounding.
    """
    log_q = F.log_softmax(student.float() / temperature, dim=-1)
    log_p = F.log_softmax(teacher.float() / temperature, dim=-1)
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)


def cross_entropy(student: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(student)[label] of logits [B, classes], any floating dtype, and labels [B] int64: [B] float32."""
    return F.cross_entropy(student.float(), labels, reduction="none")
