"""AdamW, and its learning rate as a pure function of the step."""

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
    """Turns the overflow flag `found_inf` into the scalar 0 or 1 that fused AdamW reads; torch 2.11 to 2.13.

    FSDP1's scaler passes a tensor of shape [1], which AdamW's step counts refuse ("output with shape [] doesn't match
    the broadcast shape [1]"). It holds the number of ranks with an overflow; the kernels compare with 1, and would step
    for 2.
    """
    flag: Tensor | None = vars(optimizer).get("found_inf")
    if flag is not None:
        vars(optimizer)["found_inf"] = flag.reshape(()).clamp(max=1.0)


def learning_rate(optim: Optim, step: int, last_step: int) -> float:
    """The rate of update `step` (1 to last_step): linear warm-up, then constant, or linear or cosine decay to 0.

    Not a torch scheduler: no state to save, and no wrapper of Accelerate that steps it once for each process.
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    progress = (step - 1 - optim.warmup_steps) / (last_step - optim.warmup_steps)
    if optim.schedule == "linear":
        return optim.lr * (1 - progress)
    if optim.schedule == "cosine":
        return optim.lr * 0.5 * (1 + math.cos(math.pi * progress))
    return optim.lr


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Writes the rate into every parameter group.

    With `offload_optimizer.ratio` below 1, DeepSpeed's ZeRO-3 steps the sub-groups that stay on the GPU with a second
    AdamW, whose first group has copied the rate when it was made.
    """
    engine_optimizer = vars(optimizer).get("optimizer", optimizer)
    on_gpu = vars(engine_optimizer).get("backup_optimizer")
    for group in (*optimizer.param_groups, *(on_gpu.param_groups if on_gpu is not None else ())):
        group["lr"] = value


def step_unless(optimizer: AcceleratedOptimizer, is_skipped: Tensor) -> None:
    """Steps AdamW, unless `is_skipped` (float32 scalar on the device) is 1: weights and moments stay as they are then.

    The fused kernel reads the flag on the device. Without fused kernels the host reads it, and waits for the GPU.
    """
    if optimizer.param_groups[0]["fused"]:
        # As torch's GradScaler does: the kernels return early, and the step count is restored.
        # A blocking copy, if the weights are in host memory: the CPU kernel would read the flag before it has arrived.
        optimizer.optimizer.found_inf = is_skipped.to(optimizer.param_groups[0]["params"][0].device)
        optimizer.step()
    elif not is_skipped.item():
        optimizer.step()
