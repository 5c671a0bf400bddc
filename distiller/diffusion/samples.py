"""Teacher and student drawn from the same noise, with the teacher's scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from distiller.config.diffusion import DiffusionRecipe, filled
from distiller.diffusion.architecture import Architecture
from distiller.diffusion.family import expanded
from distiller.diffusion.network import DiffusionNetwork
from distiller.diffusion.noise_process import NoiseProcess
from distiller.diffusion.sampling import Predict, draw, guide, guided_predictor, scale_of
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.diffusion.vae import Vae
from distiller.tasks.labelled_grid import labelled_grid
from distiller.tasks.student_module import damaged_student, exported_folder
from distiller.teachers.base import Teacher


def load_student(architecture: Architecture, run_dir: Path, max_sequence_length: int, device: torch.device) -> Any:
    """The exported student of a run, in float32. Raises UserError when the run has none."""
    folder = exported_folder(run_dir)
    try:
        model = architecture.model_class.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise damaged_student(run_dir, error) from error
    architecture.prepare(model, max_sequence_length)
    return model.eval().requires_grad_(False).to(device)


def student_scales(recipe: DiffusionRecipe) -> tuple[float, float]:
    """The guidance scales at which the student draws where the teacher's first network predicts, and its second.

    1 when it has learnt guided predictions, else the teacher's.
    """
    learnt = recipe.task.guidance.scale is not None or recipe.task.targets == "stored"
    return (1.0, 1.0) if learnt else recipe.sampling.scales


def draw_teacher(
    teacher: Teacher,
    network: DiffusionNetwork,
    process: NoiseProcess,
    recipe: DiffusionRecipe,
    conditions: SamplingInputs,
) -> Tensor:
    """The teacher's latents [B, C, F, H, W]; may communicate, as its placement does."""

    def predictor(part: SamplingInputs) -> Predict:
        return guided_predictor(teacher, network, range(len(part.noise)), part, recipe.sampling.scales)

    return _draw_in_parts(predictor, process, recipe, conditions)


def draw_student(
    network: DiffusionNetwork, student: Any, process: NoiseProcess, recipe: DiffusionRecipe, conditions: SamplingInputs
) -> Tensor:
    """The student's latents [B, C, F, H, W], in float32; `network` is the teacher's."""

    def predictor(part: SamplingInputs) -> Predict:
        return student_predictor(network, student, part, student_scales(recipe))

    return _draw_in_parts(predictor, process, recipe, conditions)


def _draw_in_parts(
    predictor: Callable[[SamplingInputs], Predict],
    process: NoiseProcess,
    recipe: DiffusionRecipe,
    conditions: SamplingInputs,
) -> Tensor:
    """Draws `evaluation.batch_size` samples at once: ten large ones need not fit."""
    parts = conditions.split(filled(recipe.evaluation.batch_size))
    return torch.cat([draw(predictor(part), process, part, recipe.sampling.num_steps).latents for part in parts])


def student_predictor(
    network: DiffusionNetwork, student: Any, conditions: SamplingInputs, scales: tuple[float, float]
) -> Predict:
    """The student as the pipeline's loop sees it, guided by the first scale where the teacher's first network predicts.

    A student of two experts is one network, and has learnt from both what they say without guidance.
    """
    architecture = network.architecture
    positive = {name: value.to(student.dtype) for name, value in conditions.positive.items()}
    negative = expanded(
        {name: value.to(student.dtype) for name, value in conditions.negative.items()}, len(conditions.noise)
    )

    def predict(latents: Tensor, timestep: Tensor) -> Tensor:
        times = timestep.float().expand(len(latents))
        scale = scale_of(scales, network.route([float(timestep)]))
        conditional = architecture.forward(student, latents, times, positive)
        if scale == 1:
            return conditional
        return guide(conditional, architecture.forward(student, latents, times, negative), scale)

    return predict


def write_grid(rows: Mapping[str, Tensor], prompts: Sequence[str], vae: Vae, file: Path) -> None:
    """Decodes rows of latents and writes them under their prompts; of a video, the middle frame."""
    images = {}
    for name, latents in rows.items():
        video = vae.decode(latents)
        images[name] = list(video[:, video.shape[1] // 2])
    labelled_grid(images, prompts).save(file)
