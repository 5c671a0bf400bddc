"""Drawing with a Wan transformer: the pipeline's own sampling loop, over anything that predicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor

from distiller.errors import UserError
from distiller.teachers.base import Request, Teacher
from distiller.wan.network import PREDICTION, UNCONDITIONAL, WanNetwork
from distiller.wan.pipeline import WanFiles

Predict = Callable[[Tensor, Tensor], Tensor]
"""(latents [B, C, F, H, W], timestep, a scalar) -> prediction like the latents."""


@dataclass
class Trajectory:
    """One batch's way from noise to sample. `points[s]` and `predictions[s]` (on the CPU) belong to `timesteps[s]`."""

    latents: Tensor
    timesteps: Tensor
    points: list[Tensor]
    predictions: list[Tensor]


def load_scheduler(files: WanFiles) -> Any:
    """The pipeline's own scheduler. Raises UserError when this diffusers has no such class."""
    name = str(files.scheduler_config.get("_class_name"))
    if not hasattr(diffusers, name):
        raise UserError(
            f"teacher.path: {files.source} names the scheduler {name}, which diffusers {diffusers.__version__} lacks; "
            "upgrade diffusers, or correct scheduler/scheduler_config.json"
        )
    return getattr(diffusers, name).from_pretrained(files.root, subfolder="scheduler", local_files_only=True)


def draw(predict: Predict, scheduler: Any, noise: Tensor, num_steps: int, keep_points: bool = False) -> Trajectory:
    """Runs the sampling loop of `WanPipeline.__call__` without gradients, from float32 noise to float32 latents.

    Args:
        keep_points: whether to keep every step's (x_t, prediction) as well.
    """
    with torch.no_grad():
        scheduler.set_timesteps(num_steps, device=noise.device)
        # As the pipeline does: otherwise the scheduler looks the index up, which costs a synchronisation a step.
        scheduler.set_begin_index(0)
        trajectory = Trajectory(noise, scheduler.timesteps.float(), [], [])
        for timestep in scheduler.timesteps:
            prediction = predict(trajectory.latents, timestep)
            if keep_points:
                trajectory.points.append(trajectory.latents.cpu())
                trajectory.predictions.append(prediction.float().cpu())
            trajectory.latents = scheduler.step(prediction, timestep, trajectory.latents, return_dict=False)[0]
    return trajectory


def guided_predictor(
    teacher: Teacher,
    network: WanNetwork,
    sample_ids: Sequence[int],
    text: Tensor,
    negative_text: Tensor,
    scales: tuple[float, float],
) -> Predict:
    """The teacher as the pipeline's loop sees it: `u + scale * (c - u)` above scale 1, else the conditional pass.

    Args:
        text: [B, L, D].
        negative_text: [1, L', D].
        scales: of `transformer`, and of `transformer_2` where there is one.
    """

    def predict(latents: Tensor, timestep: Tensor) -> Tensor:
        count = len(sample_ids)
        modules = network.route([float(timestep)] * count)
        scale = scales[modules[0] if modules else 0]
        inputs = {"latents": latents, "timesteps": timestep.float().expand(count), "text": text}
        wanted = (PREDICTION,)
        if scale > 1:
            inputs["negative_text"] = negative_text.expand(count, -1, -1)
            wanted = (PREDICTION, UNCONDITIONAL)
        outputs = teacher.predict([Request(tuple(sample_ids), inputs, wanted, modules)])[0]
        return guide(outputs[PREDICTION], outputs[UNCONDITIONAL], scale) if scale > 1 else outputs[PREDICTION]

    return predict


def guide(conditional: Tensor, unconditional: Tensor, scale: float | Tensor) -> Tensor:
    """Classifier-free guidance as WanPipeline computes it (Ho and Salimans 2022, arXiv 2207.12598)."""
    return unconditional + scale * (conditional - unconditional)
