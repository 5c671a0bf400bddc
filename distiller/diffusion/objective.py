"""The distances between the student's and the teacher's prediction, by the name in `task.losses.prediction.kind`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from distiller.config.diffusion import PredictionLoss
from distiller.tasks.losses import huber, mean_squared_error

DISTANCES: dict[str, Callable[[Tensor, Tensor, PredictionLoss], Tensor]] = {
    "mse": lambda student, target, options: mean_squared_error(student, target),
    "huber": lambda student, target, options: huber(student, target, options.huber_delta),
}
"""Name -> function (student [B, ...], target [B, ...], the recipe's options) -> [B] float32. A new distance needs an
entry here and its name in `PredictionLoss.kind`."""
