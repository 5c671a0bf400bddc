"""AdamW and its learning rate, which is a pure function of the update's number."""

from __future__ import annotations

import math

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from distiller.config.recipe import Optim


def build_optimizer(trained: nn.Module, optim: Optim) -> torch.optim.AdamW:
    """AdamW over all parameters; vectors and scalars (biases, norms) are not decayed. ZeRO with offload replaces it."""
    parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": parameters}]
    if optim.weight_decay:
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=optim.fused
    )
    if optim.fused:
        optimizer.register_step_pre_hook(_settle_found_inf)
    return optimizer


def _settle_found_inf(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Makes the flag of an overflow the scalar 0 or 1 that fused AdamW reads; torch 2.11 to 2.13.

    FSDP1's scaler gives a vector of one, which AdamW's counts refuse ("output with shape [] doesn't match the broadcast
    shape [1]"), and in it the number of ranks that found one. The kernels look for 1 and would take a step for 2.
    """
    flag: Tensor | None = vars(optimizer).get("found_inf")
    if flag is not None:
        vars(optimizer)["found_inf"] = flag.reshape(()).clamp(max=1.0)


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


def step_unless(optimizer: AcceleratedOptimizer, is_skipped: Tensor) -> None:
    """AdamW's step, but where `is_skipped` (float32 scalar on the device) is 1: weights and moments are untouched then.

    The fused kernel reads it where it lies. Without it the host has to know, and waits for the GPU.
    """
    if optimizer.param_groups[0]["fused"]:
        # What torch's GradScaler hands over: kernels return early, and the count of steps is put back.
        # Blocking, if the engine keeps its weights in host memory: the kernel there would read it before it arrives.
        optimizer.optimizer.found_inf = is_skipped.to(optimizer.param_groups[0]["params"][0].device)
        optimizer.step()
    elif not is_skipped.item():
        optimizer.step()
