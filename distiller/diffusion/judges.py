"""Registry and interface of judges (`evaluation.judge`), which classify generated pictures; imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

import numpy as np

from distiller.config.diffusion import DiffusionRecipe
from distiller.distributed.importing import import_object
from distiller.errors import UserError

JUDGES = {"digits": "distiller.demo.digits:DigitJudge"}
"""`evaluation.judge` -> module and class, imported on demand; `none` has no entry."""


class Judge(ABC):
    """Classifies generated pictures. The constructor may be slow; `picture_size` and `prompts` need no instance."""

    picture_size: ClassVar[tuple[int, int]]
    """Height and width of the pictures that it takes, in pixels."""

    num_features: ClassVar[int]
    """Length of the vectors that `features` returns."""

    @staticmethod
    @abstractmethod
    def prompts(count: int, seed: int) -> tuple[list[str], np.ndarray]:
        """At least `count` prompts, the same for the same seed, and the label of each, int64 [N]."""

    @abstractmethod
    def recognise(self, images: np.ndarray) -> np.ndarray:
        """The labels [N] of pictures, uint8 [N, H, W, 3]."""

    @abstractmethod
    def features(self, images: np.ndarray) -> np.ndarray:
        """What it judges pictures by, uint8 [N, H, W, 3]: float64 [N, num_features]."""


def find_judge(name: str) -> type[Judge]:
    """The class of a judge in `JUDGES`."""
    return import_object(JUDGES[name])


def judge_notices(recipe: DiffusionRecipe, prompts: Collection[str]) -> list[str]:
    """One line where the judge draws none of the data's prompts."""
    name = recipe.evaluation.judge
    if name == "none":
        return []
    own, _ = find_judge(name).prompts(recipe.evaluation.num_samples, recipe.seed)
    if not set(own).isdisjoint(prompts):
        return []
    return [
        f"evaluation.judge is {name}: `distiller evaluate` draws its own prompts (such as '{own[0]}'), none of which "
        "is in data.path; set it to none for others"
    ]


def check_judge(recipe: DiffusionRecipe) -> None:
    """Raises UserError unless the recipe's pictures have the size that its judge takes."""
    name, size = recipe.evaluation.judge, recipe.task.size[1:]
    if name == "none":
        return
    height, width = find_judge(name).picture_size
    if size != (height, width):
        raise UserError(
            f"evaluation.judge={name} looks at {height} x {width} pictures, given task.height {size[0]} and "
            f"task.width {size[1]}; change them, or set it to none"
        )
