"""The pipeline's sampling loop, with any function that predicts: a teacher in any placement, or the student."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distiller.diffusion.family import expand_conditions
from distiller.diffusion.network import PREDICTION, UNCONDITIONAL, DiffusionNetwork, inputs_of
from distiller.diffusion.noise_process import NoiseProcess
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.teachers.base import Request, Teacher

Predict = Callable[[Tensor, Tensor], Tensor]
"""(network input [B, C, F, H, W], timestep as a 0-d tensor) -> prediction [B, C, F, H, W]."""


@dataclass
class Trajectory:
    """The result of `draw` for one batch.

    Attributes:
        latents: the final latents [B, C, F, H, W] float32, on the device of the noise.
        timesteps: [S] float32, one for each prediction.
        points: the network's input at each timestep [B, C, F, H, W] float32, on the CPU; empty unless kept.
        predictions: the predictions at these points, likewise.
    """

    latents: Tensor
    timesteps: Tensor
    points: list[Tensor]
    predictions: list[Tensor]


def draw(
    predict: Predict, process: NoiseProcess, sampling_inputs: SamplingInputs, num_steps: int, keep_points: bool = False
) -> Trajectory:
    """Runs the sampling loop of the pipeline's `__call__` without gradients, from float32 noise to float32 latents.

    Communicates if `predict` does.

    Args:
        keep_points: whether to keep the network's input and prediction at every timestep.
    """
    with torch.no_grad():
        scheduler = process.load_scheduler()
        process.set_timesteps(scheduler, num_steps, sampling_inputs.noise.device)
        options = {}
        if "generator" in inspect.signature(scheduler.step).parameters:
            options["generator"] = sampling_inputs.generators()
        latents = process.first_latents(scheduler, sampling_inputs.noise)
        trajectory = Trajectory(latents, scheduler.timesteps.float(), [], [])
        for timestep in scheduler.timesteps:
            point = process.model_input(scheduler, trajectory.latents, timestep)
            # Euler schedulers return latents in the prediction's dtype; in 16 bits, rounding errors would add up.
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
    sampling_inputs: SamplingInputs,
    scales: tuple[float, float],
) -> Predict:
    """The teacher as `predict` of `draw`: u + scale * (c - u), or only the conditional pass where `scale_of` is 1.

    Communicates if the teacher's placement does.

    Args:
        scales: guidance scales of the first network and of the second, if there is one.
    """

    def predict(latents: Tensor, timestep: Tensor) -> Tensor:
        count = len(sample_ids)
        modules = network.route([float(timestep)] * count)
        scale = scale_of(scales, modules)
        negative = expand_conditions(sampling_inputs.negative, count) if scale != 1 else None
        wanted = (PREDICTION, UNCONDITIONAL) if scale != 1 else (PREDICTION,)
        inputs = inputs_of(latents, timestep.float().expand(count), sampling_inputs.positive, negative)
        outputs = teacher.predict([Request(tuple(sample_ids), inputs, wanted, modules)])[0]
        return guide(outputs[PREDICTION], outputs[UNCONDITIONAL], scale) if scale != 1 else outputs[PREDICTION]

    return predict


def scale_of(scales: tuple[float, float], modules: Sequence[int]) -> float:
    """The guidance scale of a step; `modules` is what `DiffusionNetwork.route` returns for the step's samples.

    1 means that the step needs only the conditional pass. The rule is that of the pipelines: they use guidance only if
    the first network's scale is above 1, and then guide the second network by its own scale, even if that is below 1.
    """
    return scales[modules[0] if modules else 0] if scales[0] > 1 else 1.0


def count_passes(process: NoiseProcess, network: DiffusionNetwork, num_steps: int, scales: tuple[float, float]) -> int:
    """The number of forward passes that `guided_predictor` makes for one sample."""
    routes = (network.route([timestep]) for timestep in process.timesteps(num_steps))
    return sum(1 if scale_of(scales, modules) == 1 else 2 for modules in routes)


def guide(conditional: Tensor, unconditional: Tensor, scale: float | Tensor) -> Tensor:
    """Classifier-free guidance as diffusers' pipelines compute it (Ho and Salimans 2022, arXiv 2207.12598).

    Predictions are [B, ...]; `scale` is a number or a tensor that broadcasts to them.
    """
    return unconditional + scale * (conditional - unconditional)
