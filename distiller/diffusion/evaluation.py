"""A trained student against its teacher, on noise that training never drew.

The error of what is predicted separates good from naive students far better than pictures do: it is measured where it
matters, on the points of the teacher's own trajectories, and reported by noise level.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from distiller.config.diffusion import DiffusionRecipe, filled
from distiller.diffusion.conditions import Conditions
from distiller.diffusion.drawing import draw, guided_predictor
from distiller.diffusion.family import TEXT, Family
from distiller.diffusion.judges import Judge
from distiller.diffusion.network import PREDICTION, DiffusionNetwork, inputs_of
from distiller.diffusion.noise_process import NoiseProcess
from distiller.diffusion.samples import draw_student, student_predictor, student_scales
from distiller.diffusion.text import embed
from distiller.teachers.base import Request, Teacher

NUM_BANDS = 4


@dataclass(frozen=True)
class Embedded:
    """What the prompts of each batch became, on the CPU, and the negative prompt."""

    batches: tuple[Mapping[str, Tensor], ...]
    negative: Mapping[str, Tensor]


def embed_prompts(
    family: Family, recipe: DiffusionRecipe, prompts: Sequence[str], dtype: torch.dtype, device: torch.device
) -> Embedded:
    """Embeds in batches of `evaluation.batch_size`; what embeds has left memory afterwards."""
    embedded = _embed(family, recipe, prompts, dtype, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return embedded


def _embed(
    family: Family, recipe: DiffusionRecipe, prompts: Sequence[str], dtype: torch.dtype, device: torch.device
) -> Embedded:
    encoder, length = family.load_text_encoder(dtype, device), family.text_length(recipe.task)
    size = filled(recipe.evaluation.batch_size)

    def on_cpu(texts: Sequence[str]) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in embed(family, encoder, texts, length).items()}

    batches = tuple(on_cpu(prompts[first : first + size]) for first in range(0, len(prompts), size))
    return Embedded(batches, on_cpu([recipe.task.guidance.negative_prompt]))


@dataclass(frozen=True)
class Pair:
    """Who is compared, and how both draw. The student is in float32, on the device of the teacher's answers."""

    recipe: DiffusionRecipe
    family: Family
    process: NoiseProcess
    network: DiffusionNetwork
    teacher: Teacher
    student: Any


def compare(
    pair: Pair,
    embedded: Embedded,
    labels: Sequence[int] | None,
    judge: Judge | None,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Draws every prompt with both, from the same held-out noise, and compares.

    Returns:
        `velocity_mse` (or whatever the networks predict) by share of noise and at the last sampling step,
        `velocity_relative` (||s - t||^2 / ||t||^2), `final_latent_mse`, forward times and their ratio, and with a judge
        the share of recognised pictures of each.
    """
    recipe, family, process = pair.recipe, pair.family, pair.process
    pipeline = family.load_pipeline(pair.student)
    pipeline.set_progress_bar_config(disable=True)
    vae, errors = family.load_vae(device), _Errors(process)
    shape = family.latent_shape(*recipe.task.size)
    final_errors: list[float] = []
    recognised: dict[str, list[bool]] = {"teacher": [], "student": []}
    speed: dict[str, float] = {}
    first = 0
    for positive in tqdm(embedded.batches, desc="evaluate", unit="batch", dynamic_ncols=True):
        part = range(first, first + len(positive[TEXT]))
        first = part.stop
        conditions = Conditions.make(recipe.seed, "evaluation", part, shape, positive, embedded.negative, device)
        theirs = _teacher_trajectory(pair, conditions, errors)
        scale, low_noise_scale = student_scales(recipe)
        if scale == low_noise_scale:
            ours = family.draw(pipeline, conditions, recipe, scale)
        else:
            # The pipeline of one network has one scale.
            ours = draw_student(pair.network, pair.student, process, recipe, conditions)
        final_errors += (ours - theirs).square().flatten(1).mean(1).tolist()
        if judge is not None and labels is not None:
            wanted = np.asarray([labels[i] for i in part])
            for name, latents in (("teacher", theirs), ("student", ours)):
                recognised[name] += (judge.recognise(vae.decode(latents)[:, 0]) == wanted).tolist()
        # Of the first batch: the last may be smaller.
        speed = speed or _speed(pair, conditions, device)
    report: dict[str, Any] = {
        "num_samples": first,
        "num_inference_steps": recipe.sampling.num_steps,
        f"{process.quantity}_mse": errors.by_band(),
        f"{process.quantity}_mse_last_step": errors.last_step(),
        f"{process.quantity}_relative": errors.relative(),
        "final_latent_mse": sum(final_errors) / len(final_errors),
        **speed,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "teacher_dtype": str(dtype).removeprefix("torch."),
    }
    for name, hits in recognised.items():
        report[f"{name}_recognised"] = sum(hits) / len(hits) if hits else None
    return report


class _Errors:
    """Squared errors of predictions by noise level."""

    def __init__(self, process: NoiseProcess) -> None:
        self._process = process
        self._bands: dict[int, list[float]] = defaultdict(list)
        self._last: list[float] = []
        self._error = self._energy = 0.0

    def add(self, timestep: float, ours: Tensor, theirs: Tensor, is_last: bool) -> None:
        """Of each sample on its own, since the last batch may be smaller than the others."""
        errors = (ours.float() - theirs).square().flatten(1).mean(1).tolist()
        band = min(int(NUM_BANDS * self._process.share_of(timestep)), NUM_BANDS - 1)
        self._bands[band] += errors
        if is_last:
            self._last += errors
        self._error += sum(errors)
        self._energy += theirs.square().flatten(1).mean(1).sum().item()

    def by_band(self) -> dict[str, float]:
        name = self._process.share_name
        return {
            f"{name} {band / NUM_BANDS:.2f}-{(band + 1) / NUM_BANDS:.2f}": sum(values) / len(values)
            for band, values in sorted(self._bands.items())
        }

    def last_step(self) -> float:
        return sum(self._last) / len(self._last)

    def relative(self) -> float:
        return self._error / self._energy


def _teacher_trajectory(pair: Pair, conditions: Conditions, errors: _Errors) -> Tensor:
    """The teacher's latents; what the student predicts at each of its points goes into `errors`."""
    sampling, count = pair.recipe.sampling, len(conditions.noise)
    predict = guided_predictor(pair.teacher, pair.network, range(count), conditions, sampling.scales)
    trajectory = draw(predict, pair.process, conditions, sampling.num_steps, keep_points=True)
    student_predict = student_predictor(pair.network, pair.student, conditions, student_scales(pair.recipe))
    with torch.no_grad():
        for step, timestep in enumerate(trajectory.timesteps):
            ours = student_predict(trajectory.points[step].to(timestep.device), timestep)
            is_last = step == len(trajectory.timesteps) - 1
            errors.add(timestep.item(), ours.cpu(), trajectory.predictions[step], is_last)
    return trajectory.latents


def _speed(pair: Pair, conditions: Conditions, device: torch.device) -> dict[str, float]:
    """Median time of one conditional forward pass at the evaluation's batch size, in each one's own dtype."""
    count = len(conditions.noise)
    times = torch.full((count,), 500.0, device=device)
    inputs = inputs_of(conditions.noise, times, conditions.positive, None)
    request = Request(tuple(range(count)), inputs, (PREDICTION,), pair.network.route([500.0] * count))
    predict = student_predictor(pair.network, pair.student, conditions, (1.0, 1.0))
    with torch.no_grad():
        teacher_ms = _median_ms(lambda: pair.teacher.predict([request]), device)
        student_ms = _median_ms(lambda: predict(conditions.noise, times[0]), device)
    return {"teacher_forward_ms": teacher_ms, "student_forward_ms": student_ms, "speed_ratio": teacher_ms / student_ms}


def _median_ms(call: Callable[[], Any], device: torch.device, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - started))
    return float(np.median(times))
