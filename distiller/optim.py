"""AdamW and its learning rate, which is a pure function of the update's number."""

from __future__ import annotations

import math

import torch
from torch import nn

from distiller.config import Optim


def build_optimizer(trained: nn.Module, optim: Optim) -> torch.optim.AdamW:
    """AdamW over all parameters; vectors and scalars (biases, norms) are not decayed. ZeRO with offload replaces it."""
    parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": parameters}]
    if optim.weight_decay:
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=optim.fused
    )


def learning_rate(optim: Optim, step: int, last_step: int) -> float:
    """The rate of update `step` (1 to last_step): linear warm-up, then constant, or linear or cosine decay to 0.

    Not a torch scheduler: there is no state to save, and no wrapper that would step it once a process.
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    progress = (step - 1 - optim.warmup_steps) / max(1, last_step - optim.warmup_steps)
    if optim.schedule == "linear":
        return optim.lr * (1 - progress)
    if optim.schedule == "cosine":
        return optim.lr * 0.5 * (1 + math.cos(math.pi * progress))
    return optim.lr


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Writes the rate into every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = value
