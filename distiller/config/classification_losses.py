"""The registry of the losses of task `classification`, each a section of `task.losses`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, final

from pydantic import Field

from distiller.config.recipe import FeatureLoss
from distiller.config.sections import Float, PositiveFloat, Section


@final
class DistillationLoss(Section):
    """alpha x T^2 x KL(teacher || student at temperature T) + (1 - alpha) x cross-entropy with the labels."""

    alpha: Annotated[Float, Field(ge=0, le=1)] = Field(
        default=0.5, description="share of the teacher; 0 = labels alone, 1 = teacher alone"
    )
    temperature: PositiveFloat = Field(default=4.0, description="T, of both softmaxes in the divergence")


@dataclass(frozen=True)
class LossSpec:
    """A loss of the registry.

    Attributes:
        options: its section of the recipe, in which every key has a default.
        loss_class: "module:Class" of its `distiller.vision.objective.ClassifierLoss`, imported when the task is opened.
    """

    options: type[Section]
    loss_class: str


LOSSES = {
    "distillation": LossSpec(DistillationLoss, "distiller.vision.objective:Distillation"),
    "features": LossSpec(FeatureLoss, "distiller.vision.objective:FeatureMatching"),
}
"""Name of the section in `task.losses` -> the loss. The recipe's keys, messages and documents, what the teacher is
asked for, and the sum that is trained follow from it."""
