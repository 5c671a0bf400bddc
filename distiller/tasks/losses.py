"""Losses as pure tensor functions: float32 inside, one value a sample out."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def mean_squared_error(student: Tensor, target: Tensor) -> Tensor:
    """Mean over everything but the first axis of (student - target)^2.

    Args:
        student: [B, ...], any floating dtype.
        target: [B, ...], the same shape.

    Returns:
        [B] float32.
    """
    return F.mse_loss(student.float(), target.float(), reduction="none").flatten(1).mean(1)


def huber(student: Tensor, target: Tensor, delta: float) -> Tensor:
    """Mean over everything but the first axis of the Huber loss (Huber 1964): quadratic up to `delta`, linear beyond.

    Scaled so that it equals half the squared error near 0. Shapes and dtypes as in `mean_squared_error`.
    """
    return F.huber_loss(student.float(), target.float(), reduction="none", delta=delta).flatten(1).mean(1)
