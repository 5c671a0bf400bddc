"""The registry of distances between the student's and the teacher's prediction. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DistanceSpec:
    """A distance of the registry.

    Attributes:
        function: "module:name" of a `distiller.diffusion.objective.Distance`, imported when the task is opened.
        description: a few words for the table of the recipe's keys.
    """

    function: str
    description: str


DISTANCES = {
    "mse": DistanceSpec("distiller.diffusion.objective:squared_distance", "squared error"),
    "huber": DistanceSpec("distiller.diffusion.objective:huber_distance", "linear beyond huber_delta"),
}
"""The value of `task.losses.prediction.kind` -> the distance. The recipe's values, messages and documents, and the
function that is trained, follow from it."""
