"""Feature matching: projections of the student's block outputs into the teacher's widths, and their loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from distiller.data import rng
from distiller.tasks.losses import mean_squared_error


def new_projections(shapes: Sequence[tuple[Sequence[int], Sequence[int]]], seed: int) -> nn.ModuleList:
    """One projection without bias for each pair of blocks, drawn from `seed`; the global random state stays as it was.

    Args:
        shapes: what the student's and the teacher's block give for one sample: (C, H, W), for which the projection is a
            1 x 1 convolution, or (tokens, width) or (width,), for which it is linear.
        seed: of the run; the student's own weights are drawn from the same, so these are drawn from the next.
    """
    with rng.seeded(seed + 1):
        return nn.ModuleList(_projection(student, teacher) for student, teacher in shapes)


def _projection(student: Sequence[int], teacher: Sequence[int]) -> nn.Module:
    if len(student) == 3:
        return nn.Conv2d(student[0], teacher[0], 1, bias=False)
    return nn.Linear(student[-1], teacher[-1], bias=False)


def feature_loss(features: Sequence[Tensor], teacher: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """The mean over blocks of the mean squared error, summed over samples; a float32 scalar.

    Args:
        features: the student's projected block outputs, each [B, ...].
        teacher: the teacher's outputs; `names` are those of the matched blocks, in the order of `features`.
    """
    total = features[0].new_zeros((), dtype=torch.float32)
    for ours, name in zip(features, names, strict=True):
        total = total + mean_squared_error(ours, teacher[name]).sum()
    return total / len(names)
