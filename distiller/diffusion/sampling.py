"""The pipeline's own sampling loop, with any network that predicts: a placed teacher, or the student."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distiller.diffusion.family import expanded
from distiller.diffusion.network import PREDICTION, UNCONDITIONAL, DiffusionNetwork, inputs_of
from distiller.diffusion.noise_process import NoiseProcess
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.teachers.base import Request, Teacher

Predict = Callable[[Tensor, Tensor], Tensor]
"""(what the network gets [B, C, F, H, W], timestep, a scalar) -> prediction like the latents."""


@dataclass
class Trajectory:
    """One batch's way from noise to sample.

    `points[s]`, what the network got, and `predictions[s]` (on the CPU) belong to `timesteps[s]`.
    """

    latents: Tensor
    timesteps: Tensor
    points: list[Tensor]
    predictions: list[Tensor]


def draw(
    predict: Predict, process: NoiseProcess, conditions: SamplingInputs, num_steps: int, keep_points: bool = False
) -> Trajectory:
    """Runs the sampling loop of the pipeline's `__call__` without gradients, from float32 noise to float32 latents.

    Args:
        keep_points: whether to keep every step's (x_t, prediction) as well.
    """
    with torch.no_grad():
        scheduler = process.load_scheduler()
        process.begin(scheduler, num_steps, conditions.noise.device)
        options = {}
        if "generator" in inspect.signature(scheduler.step).parameters:
            options["generator"] = conditions.generators()
        latents = process.first_latents(scheduler, conditions.noise)
        trajectory = Trajectory(latents, scheduler.timesteps.float(), [], [])
        for timestep in scheduler.timesteps:
            point = process.model_input(scheduler, trajectory.latents, timestep)
            # Schedulers of Euler's kind give latents in the prediction's dtype, and 16 bits add up over the steps.
            prediction = predict(point, timestep).float()
            if keep_points:
                trajectory.points.append(point.cpu())
                trajectory.predictions.append(prediction.cpu())
            stepped = scheduler.step(prediction, timestep, trajectory.latents, return_dict=False, **options)
            trajectory.latents = stepped[0]
    return trajectory


def guided_predictor(
    teacher: Teacher,
    network: DiffusionNetwork,
    sample_ids: Sequence[int],
    conditions: SamplingInputs,
    scales: tuple[float, float],
) -> Predict:
    """The teacher as the pipeline's loop sees it: `u + scale * (c - u)`, at scale 1 (`scale_of`) the conditional pass.

    Args:
        scales: of the first network, and of the second where there is one.
    """

    def predict(latents: Tensor, timestep: Tensor) -> Tensor:
        count = len(sample_ids)
        modules = network.route([float(timestep)] * count)
        scale = scale_of(scales, modules)
        negative = expanded(conditions.negative, count) if scale != 1 else None
        wanted = (PREDICTION, UNCONDITIONAL) if scale != 1 else (PREDICTION,)
        inputs = inputs_of(latents, timestep.float().expand(count), conditions.positive, negative)
        outputs = teacher.predict([Request(tuple(sample_ids), inputs, wanted, modules)])[0]
        return guide(outputs[PREDICTION], outputs[UNCONDITIONAL], scale) if scale != 1 else outputs[PREDICTION]

    return predict


def scale_of(scales: tuple[float, float], modules: Sequence[int]) -> float:
    """The guidance scale of a step whose samples are predicted by `modules` (those of `DiffusionNetwork.route`).

    1 where the step needs the conditional pass alone: the pipelines decide by the first network's scale whether they
    guide at all (only above 1), and then guide the second network by its own scale, whatever it is.
    """
    return scales[modules[0] if modules else 0] if scales[0] > 1 else 1.0


def count_passes(process: NoiseProcess, network: DiffusionNetwork, num_steps: int, scales: tuple[float, float]) -> int:
    """How many forward passes one sample takes that is drawn by `guided_predictor`."""
    routes = (network.route([timestep]) for timestep in process.timesteps(num_steps))
    return sum(1 if scale_of(scales, modules) == 1 else 2 for modules in routes)


def guide(conditional: Tensor, unconditional: Tensor, scale: float | Tensor) -> Tensor:
    """Classifier-free guidance as diffusers' pipelines compute it (Ho and Salimans 2022, arXiv 2207.12598)."""
    return unconditional + scale * (conditional - unconditional)
