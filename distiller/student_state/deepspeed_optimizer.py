"""The state of DeepSpeed's optimizers beside the moments: number of steps, bias correction, loss scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distiller.student_state.base import Counters

LOSS_SCALER_FIELDS = {
    "scale": "cur_scale",
    "cur_iter": "cur_iter",
    "last_overflow_iter": "last_overflow_iter",
    "cur_hysteresis": "cur_hysteresis",
}
"""Saved name -> attribute of DeepSpeed's DynamicLossScaler. `scale` is also the name in torch's GradScaler."""


def counters_of(zero: Any, inner: Any, precision: str) -> Counters:
    """The counters of a ZeRO optimizer and the AdamW inside it.

    The engine's own counters (global_steps, micro_steps and so on) are not saved. They do not affect results, since a
    checkpoint is made between two updates, where the micro-steps of a new engine start too.
    """
    state = next((state for state in inner.state.values() if "step" in state), None)
    scaler = _dynamic_scaler(zero, precision)
    fields = {} if scaler is None else {name: getattr(scaler, field) for name, field in LOSS_SCALER_FIELDS.items()}
    return Counters(0 if state is None else int(state["step"]), fields)


def load_loss_scale(zero: Any, loss_scale: dict[str, float], precision: str) -> None:
    """Sets those fields of the scaler that were saved; under another engine only the scale was."""
    scaler = _dynamic_scaler(zero, precision)
    if scaler is None:
        return
    for name, attribute in LOSS_SCALER_FIELDS.items():
        if name in loss_scale:
            setattr(scaler, attribute, loss_scale[name])


def new_moments(inner: Any, group: dict[str, Any], flat: Tensor, updates: int) -> dict[str, Any]:
    """The optimizer's state of one flat tensor: zero moments, float32, and `updates` steps counted.

    torch's AdamW counts steps in a tensor, which its fused kernel needs on the device; DeepSpeed's optimizers count
    them in an integer.
    """
    step: Tensor | int = updates
    if isinstance(inner, torch.optim.AdamW):
        on_device = group["fused"] or group["capturable"]
        step = torch.tensor(float(updates), device=flat.device if on_device else "cpu")
    moments = {kind: torch.zeros_like(flat.detach(), dtype=torch.float32) for kind in ("exp_avg", "exp_avg_sq")}
    return {"step": step, **moments}


def replay_bias_correction(inner: Any, updates: int) -> None:
    """Sets DeepSpeedCPUAdam's own bias correction to its value after `updates` steps, by steps on a tensor of one zero.

    Its C++ side multiplies beta^t in float32 at every step, but computes pow(beta, t) when t jumps, as in a new
    process: the last bit would differ from an uninterrupted run.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if not isinstance(inner, DeepSpeedCPUAdam):
        return
    group = inner.param_groups[0]
    (beta1, beta2), zeros = group["betas"], [torch.zeros(1) for _ in range(4)]
    for step in range(1, updates + 1):
        inner.ds_opt_adam.adam_update(
            inner.opt_id, step, 0.0, beta1, beta2, group["eps"], 0.0, group["bias_correction"], *zeros
        )


def _dynamic_scaler(zero: Any, precision: str) -> Any | None:
    return zero.loss_scaler if precision == "fp16" and zero.loss_scaler.dynamic else None
