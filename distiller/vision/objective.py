"""The loss of a distilled classifier, one value a picture, in float32."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


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
