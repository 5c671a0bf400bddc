"""Compares a trained student with its teacher on noise that training did not use.

Errors of predictions tell students apart better than pictures do. They are measured at the network inputs of the
teacher's own sampling trajectories and reported by noise level.
"""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from distiller.config.diffusion import DiffusionRecipe, filled
from distiller.config.sections import flatten
from distiller.diffusion.drawing_figures import DrawingFigures
from distiller.diffusion.drawing_measures import Measures, measured_names
from distiller.diffusion.family import TEXT, Family
from distiller.diffusion.network import PREDICTION, DiffusionNetwork, inputs_of
from distiller.diffusion.noise_levels import BANDS, NoiseLevelErrors
from distiller.diffusion.noise_levels import FIGURES as LEVEL_FIGURES
from distiller.diffusion.noise_process import NoiseProcess
from distiller.diffusion.samples import draw_student, student_predictor, student_scales
from distiller.diffusion.sampling import draw, guided_predictor
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.diffusion.seed_spread import with_spread
from distiller.diffusion.text import embed
from distiller.diffusion.vae import Vae
from distiller.tasks.cost_figures import SIZE_FIGURES
from distiller.teachers.base import Request, Teacher

NUM_BANDS = 4
"""Equal ranges of the share of noise, for each of which an error is reported."""
SPEED_FIGURES = (
    *("teacher_forward_ms", "student_forward_ms", "teacher_samples_per_s", "student_samples_per_s", "speed_ratio"),
)
"""Of one forward pass; `speed_ratio` is how many times as many samples the student computes in a second."""


@dataclass(frozen=True)
class PromptEmbeddings:
    """Conditions by name, on the CPU: of each batch of prompts [B, ...], and of the negative prompt [1, ...]."""

    batches: tuple[Mapping[str, Tensor], ...]
    negative: Mapping[str, Tensor]

    def split(self, size: int) -> PromptEmbeddings:
        """The same in batches of at most `size`."""
        parts = [
            {name: value[first : first + size] for name, value in batch.items()}
            for batch in self.batches
            for first in range(0, len(batch[TEXT]), size)
        ]
        return PromptEmbeddings(tuple(parts), self.negative)


def embed_prompts(
    family: Family, recipe: DiffusionRecipe, prompts: Sequence[str], dtype: torch.dtype, device: torch.device
) -> PromptEmbeddings:
    """Embeds prompts in batches of `evaluation.batch_size`, in `dtype` on the device, and frees the text encoder."""
    embedded = _embed(family, recipe, prompts, dtype, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return embedded


def _embed(
    family: Family, recipe: DiffusionRecipe, prompts: Sequence[str], dtype: torch.dtype, device: torch.device
) -> PromptEmbeddings:
    encoder, length = family.load_text_encoder(dtype, device), family.text_length(recipe.task)
    size = filled(recipe.evaluation.batch_size)

    def on_cpu(texts: Sequence[str]) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in embed(family, encoder, texts, length).items()}

    batches = tuple(on_cpu(prompts[first : first + size]) for first in range(0, len(prompts), size))
    return PromptEmbeddings(batches, on_cpu([recipe.task.guidance.negative_prompt]))


@dataclass(frozen=True)
class Comparison:
    """Teacher and student, and what sampling from them needs.

    The student is in float32 on the device of the teacher's outputs.
    """

    recipe: DiffusionRecipe
    family: Family
    process: NoiseProcess
    network: DiffusionNetwork
    teacher: Teacher
    student: Any


def compare(
    comparison: Comparison,
    embedded: PromptEmbeddings,
    measures: Measures,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Samples every prompt from teacher and student, from the same held-out noise, and compares the results.

    Args:
        measures: what is measured on finished drawings.
        dtype: the teacher's, for the report.
        device: of sampling and of the VAE.

    Returns:
        the report, for JSON: `velocity_mse` (or `noise_mse` or `v_mse`) by range of the share of noise;
        `velocity_mse_last_step`; `velocity_relative`, ||s - t||^2 / ||t||^2; `final_latent_mse`; `by_noise_level`, see
        `NoiseLevelErrors`; what `measures` measures; `SPEED_FIGURES`. With several seeds, see `with_spread`.
    """
    recipe = comparison.recipe
    pipeline = comparison.family.load_pipeline(comparison.student)
    pipeline.set_progress_bar_config(disable=True)
    vae = comparison.family.load_vae(device)
    num_samples, num_seeds = sum(len(batch[TEXT]) for batch in embedded.batches), recipe.evaluation.seeds
    reports, speed = [], dict[str, float]()
    with tqdm(total=num_seeds * len(embedded.batches), desc="evaluate", unit="batch", dynamic_ncols=True) as bar:
        for seed in range(recipe.seed, recipe.seed + num_seeds):
            drawn = _OfOneSeed(comparison, measures(seed))
            first = 0
            for positive in embedded.batches:
                sample_ids = range(first, first + len(positive[TEXT]))
                first = sample_ids.stop
                sampling_inputs = SamplingInputs.make(
                    seed,
                    "evaluation",
                    sample_ids,
                    comparison.family.latent_shape(*recipe.task.size),
                    positive,
                    embedded.negative,
                    device,
                )
                drawn.add(sampling_inputs, pipeline, vae)
                # Measured on the first batch: the last may be smaller.
                speed = speed or _speed(comparison, sampling_inputs, device)
                bar.update()
            reports.append(drawn.figures())
    return {
        "num_samples": num_samples,
        "num_seeds": num_seeds,
        "num_inference_steps": recipe.sampling.num_steps,
        **with_spread(reports),
        **speed,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "teacher_dtype": str(dtype).removeprefix("torch."),
    }


class _OfOneSeed:
    """Draws batches from the noise of one seed, and collects all that is sampled."""

    def __init__(self, comparison: Comparison, measures: Sequence[DrawingFigures]) -> None:
        self._comparison, self._measures = comparison, measures
        self._errors = _Errors(comparison.process)
        self._levels = NoiseLevelErrors(
            comparison.recipe, comparison.process, comparison.network, comparison.teacher, comparison.student
        )
        self._final_errors: list[float] = []

    def add(self, sampling_inputs: SamplingInputs, pipeline: Any, vae: Vae) -> None:
        """Draws one batch with both models, with the student in `pipeline`."""
        comparison = self._comparison
        teacher_latents = _teacher_trajectory(comparison, sampling_inputs, self._errors)
        self._levels.add(teacher_latents, sampling_inputs)
        student_latents = _draw_student(comparison, sampling_inputs, pipeline)
        self._final_errors += (student_latents - teacher_latents).square().flatten(1).mean(1).tolist()
        if self._measures:
            drawings = {
                name: vae.decode(latents)[:, 0]
                for name, latents in (("teacher", teacher_latents), ("student", student_latents))
            }
            for measure in self._measures:
                measure.add(drawings, sampling_inputs.seeds[2])

    def figures(self) -> dict[str, Any]:
        """All figures of this seed; those of a judge are None without one."""
        quantity = self._comparison.process.quantity
        report: dict[str, Any] = {
            f"{quantity}_mse": self._errors.by_band(),
            f"{quantity}_mse_last_step": self._errors.last_step(),
            f"{quantity}_relative": self._errors.relative(),
            "final_latent_mse": sum(self._final_errors) / len(self._final_errors),
            "by_noise_level": self._levels.figures(),
            "teacher_recognised": None,
            "student_recognised": None,
        }
        for measure in self._measures:
            report |= measure.figures()
        return report


def _draw_student(comparison: Comparison, sampling_inputs: SamplingInputs, pipeline: Any) -> Tensor:
    recipe = comparison.recipe
    scale, low_noise_scale = student_scales(recipe)
    if scale == low_noise_scale:
        _seed_steps(pipeline, sampling_inputs)
        return comparison.family.draw(pipeline, sampling_inputs, recipe, scale)
    # A pipeline with one network takes one guidance scale.
    return draw_student(comparison.network, comparison.student, comparison.process, recipe, sampling_inputs)


def figure_names(recipe: DiffusionRecipe, process: NoiseProcess) -> tuple[str, ...]:
    """Dotted keys of the numbers in the report of a recipe. Reads the scheduler's settings."""
    quantity, timesteps = process.quantity, process.timesteps(recipe.sampling.num_steps)
    bands = sorted({_band(process, timestep) for timestep in timesteps})
    sampled: dict[str, Any] = {
        f"{quantity}_mse": {_band_name(process, band): 0.0 for band in bands},
        **dict.fromkeys((f"{quantity}_mse_last_step", f"{quantity}_relative", "final_latent_mse"), 0.0),
        "by_noise_level": {name: dict.fromkeys(LEVEL_FIGURES, 0.0) for name in BANDS},
        **dict.fromkeys(measured_names(recipe), 0.0),
    }
    names = flatten(with_spread([sampled] * recipe.evaluation.seeds))
    return ("num_samples", "num_seeds", "num_inference_steps", *names, *SPEED_FIGURES, *SIZE_FIGURES)


def main_figure(recipe: DiffusionRecipe, process: NoiseProcess) -> str:
    """The name of the figure that says most about the student's quality."""
    return "student_recognised" if recipe.evaluation.judge != "none" else f"{process.quantity}_relative"


def _seed_steps(pipeline: Any, sampling_inputs: SamplingInputs) -> None:
    """Makes the scheduler's steps draw their noise from the samples' generators; not all pipelines pass them on."""
    step = type(pipeline.scheduler).step
    if "generator" in inspect.signature(step).parameters:
        pipeline.scheduler.step = partial(step, pipeline.scheduler, generator=sampling_inputs.generators())


class _Errors:
    """Collects squared errors of the student's predictions by noise level."""

    def __init__(self, process: NoiseProcess) -> None:
        self._process = process
        self._bands: dict[int, list[float]] = defaultdict(list)
        self._last: list[float] = []
        self._error = self._energy = 0.0

    def add(self, timestep: float, student: Tensor, teacher: Tensor, is_last: bool) -> None:
        """Adds predictions [B, ...] of the student and of the teacher (float32), both on the CPU.

        Every sample counts equally, since the last batch may be smaller than the others.
        """
        errors = (student.float() - teacher).square().flatten(1).mean(1).tolist()
        self._bands[_band(self._process, timestep)] += errors
        if is_last:
            self._last += errors
        self._error += sum(errors)
        self._energy += teacher.square().flatten(1).mean(1).sum().item()

    def by_band(self) -> dict[str, float]:
        """The mean squared error in each range of the share of noise that has any, by its name."""
        return {
            _band_name(self._process, band): sum(values) / len(values) for band, values in sorted(self._bands.items())
        }

    def last_step(self) -> float:
        """The mean squared error at the last timestep."""
        return sum(self._last) / len(self._last)

    def relative(self) -> float:
        """The sum of squared errors, divided by that of the teacher's squared predictions."""
        return self._error / self._energy


def _band(process: NoiseProcess, timestep: float) -> int:
    return min(int(NUM_BANDS * process.share_of(timestep)), NUM_BANDS - 1)


def _band_name(process: NoiseProcess, band: int) -> str:
    return f"{process.share_name} {band / NUM_BANDS:.2f}-{(band + 1) / NUM_BANDS:.2f}"


def _teacher_trajectory(comparison: Comparison, sampling_inputs: SamplingInputs, errors: _Errors) -> Tensor:
    """The latents that the teacher generates. Adds the student's errors at the points of its trajectory to `errors`."""
    sampling, count = comparison.recipe.sampling, len(sampling_inputs.noise)
    predict = guided_predictor(comparison.teacher, comparison.network, range(count), sampling_inputs, sampling.scales)
    trajectory = draw(predict, comparison.process, sampling_inputs, sampling.num_steps, keep_points=True)
    student_predict = student_predictor(
        comparison.network, comparison.student, sampling_inputs, student_scales(comparison.recipe)
    )
    with torch.no_grad():
        for step, timestep in enumerate(trajectory.timesteps):
            prediction = student_predict(trajectory.points[step].to(timestep.device), timestep)
            is_last = step == len(trajectory.timesteps) - 1
            errors.add(timestep.item(), prediction.cpu(), trajectory.predictions[step], is_last)
    return trajectory.latents


def _speed(comparison: Comparison, sampling_inputs: SamplingInputs, device: torch.device) -> dict[str, float]:
    """Median times in ms of one conditional forward pass, the samples a second in it, and the ratio of the speeds.

    Measured at the middle of the training schedule with the evaluation's batch size, each model in its own dtype. Of
    two experts, which have the same architecture, the one that is responsible there is measured.
    """
    count, middle = len(sampling_inputs.noise), comparison.process.num_train_timesteps / 2
    times = torch.full((count,), middle, device=device)
    inputs = inputs_of(sampling_inputs.noise, times, sampling_inputs.positive, None)
    request = Request(tuple(range(count)), inputs, (PREDICTION,), comparison.network.route([middle] * count))
    predict = student_predictor(comparison.network, comparison.student, sampling_inputs, (1.0, 1.0))
    with torch.no_grad():
        teacher_ms = _median_ms(lambda: comparison.teacher.predict([request]), device)
        student_ms = _median_ms(lambda: predict(sampling_inputs.noise, times[0]), device)
    samples_per_s = 1e3 * count / teacher_ms, 1e3 * count / student_ms
    return dict(zip(SPEED_FIGURES, (teacher_ms, student_ms, *samples_per_s, teacher_ms / student_ms), strict=True))


def _median_ms(call: Callable[[], Any], device: torch.device, repeats: int = 7) -> float:
    """The median wall-clock time of `call` in ms, until its GPU work is done."""
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
