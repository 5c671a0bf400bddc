"""A trained Wan student against its teacher, on noise that training never drew.

Velocity error separates good from naive students far better than pictures do: it is measured where it matters, on the
points of the teacher's own trajectories, and reported by noise level.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from torch import Tensor
from tqdm import tqdm

from distiller import draws
from distiller.diffusion_config import DiffusionRecipe
from distiller.teachers.base import Request, Teacher
from distiller.wan.drawing import draw, guided_predictor, load_scheduler
from distiller.wan.network import PREDICTION, WanNetwork
from distiller.wan.pipeline import WanFiles
from distiller.wan.samples import Conditions, student_predictor, student_scale
from distiller.wan.text import embed, load_text_encoder
from distiller.wan.vae import Vae

NUM_BANDS = 4
Judge = Callable[[np.ndarray], np.ndarray]
"""uint8 pictures [N, H, W, 3] -> the label of each, [N]."""


def compare(
    recipe: DiffusionRecipe,
    files: WanFiles,
    network: WanNetwork,
    teacher: Teacher,
    student: WanTransformer3DModel,
    prompts: Sequence[str],
    labels: Sequence[int] | None,
    judge: Judge | None,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Draws every prompt with both, from the same held-out noise, and compares.

    Returns:
        `velocity_mse` by band of sigma and at the last sampling step, `velocity_relative` (||s - t||^2 / ||t||^2),
        `final_latent_mse`, forward times and their ratio, and with a judge the share of recognised pictures of each.
    """
    encoder = load_text_encoder(files, dtype, device)
    length = recipe.task.max_sequence_length
    negative_text = embed(encoder, [recipe.task.guidance.negative_prompt], length)
    pipeline = WanPipeline.from_pretrained(
        files.fetch("scheduler"),
        transformer=student,
        transformer_2=None,
        vae=None,
        text_encoder=None,
        tokenizer=None,
        boundary_ratio=None,
        local_files_only=True,
    )
    pipeline.set_progress_bar_config(disable=True)
    vae = Vae(files, device)
    errors, shape = (
        _Errors(files.num_train_timesteps),
        files.latent_shape(recipe.task.num_frames, recipe.task.height, recipe.task.width),
    )
    final_errors: list[float] = []
    recognised: dict[str, list[bool]] = {"teacher": [], "student": []}
    conditions: Conditions | None = None
    size = recipe.evaluation.batch_size
    for first in tqdm(range(0, len(prompts), size), desc="evaluate", unit="batch", dynamic_ncols=True):
        part = range(first, min(first + size, len(prompts)))
        noise = torch.stack([draws.noise(recipe.seed, 0, i, shape, "evaluation") for i in part]).to(device)
        conditions = Conditions(noise, embed(encoder, [prompts[i] for i in part], length), negative_text)
        theirs = _teacher_trajectory(recipe, files, network, teacher, conditions, errors, student)
        ours = _pipeline_latents(pipeline, recipe, conditions)
        final_errors += (ours - theirs).square().flatten(1).mean(1).tolist()
        if judge is not None and labels is not None:
            wanted = np.asarray([labels[i] for i in part])
            for name, latents in (("teacher", theirs), ("student", ours)):
                recognised[name] += (judge(vae.decode(latents)[:, 0]) == wanted).tolist()
    assert conditions is not None
    report: dict[str, Any] = {
        "num_samples": len(prompts),
        "num_inference_steps": recipe.sampling.num_inference_steps,
        "velocity_mse": errors.by_band(),
        "velocity_mse_last_step": errors.last_step(),
        "velocity_relative": errors.relative(),
        "final_latent_mse": sum(final_errors) / len(final_errors),
        **_speed(network, teacher, student, conditions, device),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "teacher_dtype": str(dtype).removeprefix("torch."),
    }
    for name, hits in recognised.items():
        report[f"{name}_recognised"] = sum(hits) / len(hits) if hits else None
    return report


class _Errors:
    """Squared velocity errors by noise level."""

    def __init__(self, num_train_timesteps: int) -> None:
        self._num_train_timesteps = num_train_timesteps
        self._bands: dict[int, list[float]] = defaultdict(list)
        self._last: list[float] = []
        self._error = self._energy = 0.0

    def add(self, timestep: float, ours: Tensor, theirs: Tensor, is_last: bool) -> None:
        error = (ours.float() - theirs).square().mean().item()
        band = min(int(NUM_BANDS * timestep / self._num_train_timesteps), NUM_BANDS - 1)
        self._bands[band].append(error)
        if is_last:
            self._last.append(error)
        self._error += error
        self._energy += theirs.square().mean().item()

    def by_band(self) -> dict[str, float]:
        return {
            f"sigma {band / NUM_BANDS:.2f}-{(band + 1) / NUM_BANDS:.2f}": sum(values) / len(values)
            for band, values in sorted(self._bands.items())
        }

    def last_step(self) -> float:
        return sum(self._last) / len(self._last)

    def relative(self) -> float:
        return self._error / self._energy


def _teacher_trajectory(
    recipe: DiffusionRecipe,
    files: WanFiles,
    network: WanNetwork,
    teacher: Teacher,
    conditions: Conditions,
    errors: _Errors,
    student: WanTransformer3DModel,
) -> Tensor:
    """The teacher's latents; what the student predicts at each of its points goes into `errors`."""
    sampling, count = recipe.sampling, len(conditions.noise)
    text, negative_text = conditions.text, conditions.negative_text
    predict = guided_predictor(teacher, network, range(count), text, negative_text, sampling.scales)
    trajectory = draw(predict, load_scheduler(files), conditions.noise, sampling.num_inference_steps, keep_points=True)
    student_predict = student_predictor(student, conditions, student_scale(recipe))
    with torch.no_grad():
        for step, timestep in enumerate(trajectory.timesteps):
            ours = student_predict(trajectory.points[step].to(timestep.device), timestep)
            is_last = step == len(trajectory.timesteps) - 1
            errors.add(timestep.item(), ours.cpu(), trajectory.predictions[step], is_last)
    return trajectory.latents


def _pipeline_latents(pipeline: WanPipeline, recipe: DiffusionRecipe, conditions: Conditions) -> Tensor:
    """What diffusers' own pipeline draws with the student in the teacher's place."""
    return pipeline(
        latents=conditions.noise,
        prompt_embeds=conditions.text.float(),
        negative_prompt_embeds=conditions.negative_text.float().expand(len(conditions.noise), -1, -1),
        height=recipe.task.height,
        width=recipe.task.width,
        num_frames=recipe.task.num_frames,
        num_inference_steps=recipe.sampling.num_inference_steps,
        guidance_scale=student_scale(recipe),
        output_type="latent",
    ).frames


def _speed(
    network: WanNetwork, teacher: Teacher, student: WanTransformer3DModel, conditions: Conditions, device: torch.device
) -> dict[str, float]:
    """Median time of one conditional forward pass at the evaluation's batch size, in each one's own dtype."""
    count = len(conditions.noise)
    times = torch.full((count,), 500.0, device=device)
    inputs = {"latents": conditions.noise, "timesteps": times, "text": conditions.text}
    request = Request(tuple(range(count)), inputs, (PREDICTION,), network.route([500.0] * count))
    predict = student_predictor(student, conditions, scale=1.0)
    with torch.no_grad():
        teacher_ms = _median_ms(lambda: teacher.predict([request]), device)
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
