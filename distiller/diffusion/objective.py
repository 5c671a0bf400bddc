"""Distances between the student's and the teacher's prediction; `distiller.config.prediction_distances` names them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from distiller.config.diffusion import PredictionLoss
from distiller.config.prediction_distances import DISTANCES
from distiller.distributed.importing import import_object
from distiller.tasks.losses import huber, mean_squared_error

Distance = Callable[[Tensor, Tensor, PredictionLoss], Tensor]
"""(student [B, ...], target [B, ...], the recipe's options) -> [B] float32; both inputs in any floating dtype."""


def distance_of(options: PredictionLoss) -> Distance:
    """The function of the distance that a recipe names."""
    return import_object(DISTANCES[options.kind].function)


def squared_distance(student: Tensor, target: Tensor, options: PredictionLoss) -> Tensor:
    """`mse`: the mean squared error."""
    del options
    return mean_squared_error(student, target)


def huber_distance(student: Tensor, target: Tensor, options: PredictionLoss) -> Tensor:
    """`huber`: the Huber loss, which turns linear at `huber_delta`."""
    return huber(student, target, options.huber_delta)
