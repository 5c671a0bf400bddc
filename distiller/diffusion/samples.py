"""Samples of teacher and student from the same noise, with the teacher's scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from distiller.config.diffusion import DiffusionRecipe, filled
from distiller.diffusion.architecture import Architecture
from distiller.diffusion.family import expand_conditions
from distiller.diffusion.network import DiffusionNetwork
from distiller.diffusion.noise_process import NoiseProcess
from distiller.diffusion.sampling import Predict, draw, guide, guided_predictor, scale_of
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.diffusion.vae import Vae
from distiller.tasks.labelled_grid import labelled_grid
from distiller.tasks.student_module import damaged_student, exported_folder
from distiller.teachers.base import Teacher


def load_student(architecture: Architecture, run_dir: Path, max_sequence_length: int, device: torch.device) -> Any:
    """The exported student of a run, in float32 and eval mode on the device.

    Raises UserError when the run has none or its files are damaged.
    """
    folder = exported_folder(run_dir)
    try:
        model = architecture.model_class.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise damaged_student(run_dir, error) from error
    architecture.prepare(model, max_sequence_length)
    return model.eval().requires_grad_(False).to(device)


def student_scales(recipe: DiffusionRecipe) -> tuple[float, float]:
    """The student's guidance scales at timesteps of the teacher's first network and of its second.

    Both are 1 when the student has learnt guided predictions; otherwise they are the teacher's.
    """
    learnt = recipe.task.guidance.scale is not None or recipe.task.targets == "stored"
    return (1.0, 1.0) if learnt else recipe.sampling.scales


def draw_teacher(
    teacher: Teacher,
    network: DiffusionNetwork,
    process: NoiseProcess,
    recipe: DiffusionRecipe,
    sampling_inputs: SamplingInputs,
) -> Tensor:
    """Latents that the teacher generates: [B, C, F, H, W] float32. Communicates if the teacher's placement does."""

    def predictor(part: SamplingInputs) -> Predict:
        return guided_predictor(teacher, network, range(len(part.noise)), part, recipe.sampling.scales)

    return _draw_in_parts(predictor, process, recipe, sampling_inputs)


def draw_student(
    network: DiffusionNetwork,
    student: Any,
    process: NoiseProcess,
    recipe: DiffusionRecipe,
    sampling_inputs: SamplingInputs,
) -> Tensor:
    """Latents that the student generates: [B, C, F, H, W] float32. `network` is the teacher's."""

    def predictor(part: SamplingInputs) -> Predict:
        return student_predictor(network, student, part, student_scales(recipe))

    return _draw_in_parts(predictor, process, recipe, sampling_inputs)


def _draw_in_parts(
    predictor: Callable[[SamplingInputs], Predict],
    process: NoiseProcess,
    recipe: DiffusionRecipe,
    sampling_inputs: SamplingInputs,
) -> Tensor:
    """Generates `evaluation.batch_size` samples at a time, since all of them may not fit into memory."""
    parts = sampling_inputs.split(filled(recipe.evaluation.batch_size))
    return torch.cat([draw(predictor(part), process, part, recipe.sampling.num_steps).latents for part in parts])


def student_predictor(
    network: DiffusionNetwork, student: Any, sampling_inputs: SamplingInputs, scales: tuple[float, float]
) -> Predict:
    """The student as `predict` of `draw`, guided by `scales[i]` at timesteps of the teacher's network i.

    The student of a teacher with two experts is one network for all timesteps.
    """
    architecture = network.architecture
    positive = {name: value.to(student.dtype) for name, value in sampling_inputs.positive.items()}
    negative = expand_conditions(
        {name: value.to(student.dtype) for name, value in sampling_inputs.negative.items()}, len(sampling_inputs.noise)
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
    """Decodes named rows of latents [B, C, F, H, W] and writes them as one image under their prompts.

    A video is shown by its middle frame.
    """
    images = {}
    for name, latents in rows.items():
        video = vae.decode(latents)
        images[name] = list(video[:, video.shape[1] // 2])
    labelled_grid(images, prompts).save(file)
