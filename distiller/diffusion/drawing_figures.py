"""Interface of what is measured on finished drawings, and the figure of a judge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from distiller.diffusion.judges import Judge

MODELS = ("teacher", "student")


class DrawingFigures(ABC):
    """Measures the drawings of teacher and student of one seed, added batch by batch."""

    @abstractmethod
    def add(self, drawings: Mapping[str, np.ndarray], sample_ids: Sequence[int]) -> None:
        """Adds drawings of the same prompts by each of `MODELS`: uint8 [B, H, W, 3]; of a video, its first frame."""

    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """The figures over all drawings, of which there is at least one; None where there are too few."""


@final
class Recognised(DrawingFigures):
    """`NAME_recognised`: the share of each model's drawings in which a judge sees what was asked for, 0 to 1."""

    def __init__(self, judge: Judge, labels: np.ndarray) -> None:
        """`labels`: the right label of each sample id [N]."""
        self._judge, self._labels = judge, labels
        self._hits: dict[str, list[bool]] = {name: [] for name in MODELS}

    def add(self, drawings: Mapping[str, np.ndarray], sample_ids: Sequence[int]) -> None:
        expected = self._labels[list(sample_ids)]
        for name, hits in self._hits.items():
            hits += (self._judge.recognise(drawings[name]) == expected).tolist()

    def figures(self) -> dict[str, Any]:
        return {f"{name}_recognised": sum(hits) / len(hits) for name, hits in self._hits.items()}
