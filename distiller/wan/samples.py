"""Teacher and student drawn from the same noise, with the teacher's scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from safetensors import SafetensorError
from torch import Tensor

from distiller.diffusion_config import DiffusionRecipe
from distiller.errors import UserError
from distiller.picture import labelled_grid
from distiller.teachers.base import Teacher
from distiller.wan.drawing import Predict, draw, guide, guided_predictor, load_scheduler
from distiller.wan.network import WanNetwork
from distiller.wan.pipeline import WanFiles
from distiller.wan.short_text import install_short_text
from distiller.wan.vae import Vae


@dataclass(frozen=True)
class Conditions:
    """What a batch is drawn from: noise [B, C, F, H, W] float32, text [B, L, D], negative_text [1, L', D]."""

    noise: Tensor
    text: Tensor
    negative_text: Tensor


def load_student(run_dir: Path, max_sequence_length: int, device: torch.device) -> WanTransformer3DModel:
    """The exported student of a run, in float32. Raises UserError when the run has none."""
    folder = run_dir / "student"
    if not (folder / "config.json").is_file():
        raise UserError(f"{run_dir}: has no student/ yet; finish its training first")
    try:
        model = WanTransformer3DModel.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise UserError(f"{run_dir}: its student/ is damaged ({error}); copy it again") from error
    install_short_text(model, max_sequence_length)
    return model.eval().requires_grad_(False).to(device)


def student_scale(recipe: DiffusionRecipe) -> float:
    """The guidance scale at which the student draws: 1 when it has learnt guided predictions, else the teacher's."""
    learnt = recipe.task.guidance.scale is not None or recipe.task.targets == "stored"
    return 1.0 if learnt else recipe.sampling.guidance_scale


def draw_teacher(
    teacher: Teacher, network: WanNetwork, files: WanFiles, recipe: DiffusionRecipe, conditions: Conditions
) -> Tensor:
    """The teacher's latents [B, C, F, H, W]; may communicate, as its placement does."""
    sampling, ids = recipe.sampling, range(len(conditions.noise))
    predict = guided_predictor(teacher, network, ids, conditions.text, conditions.negative_text, sampling.scales)
    return draw(predict, load_scheduler(files), conditions.noise, sampling.num_inference_steps).latents


def draw_student(
    student: WanTransformer3DModel, files: WanFiles, recipe: DiffusionRecipe, conditions: Conditions
) -> Tensor:
    """The student's latents [B, C, F, H, W], in float32."""
    predict = student_predictor(student, conditions, student_scale(recipe))
    return draw(predict, load_scheduler(files), conditions.noise, recipe.sampling.num_inference_steps).latents


def student_predictor(student: WanTransformer3DModel, conditions: Conditions, scale: float) -> Predict:
    """The student as the pipeline's loop sees it."""
    text = conditions.text.to(student.dtype)
    negative_text = conditions.negative_text.to(student.dtype).expand(len(text), -1, -1)

    def predict(latents: Tensor, timestep: Tensor) -> Tensor:
        times = timestep.float().expand(len(latents))
        conditional = student(latents, times, text, return_dict=False)[0]
        if scale <= 1:
            return conditional
        return guide(conditional, student(latents, times, negative_text, return_dict=False)[0], scale)

    return predict


def write_grid(rows: Mapping[str, Tensor], prompts: Sequence[str], vae: Vae, file: Path) -> None:
    """Decodes rows of latents and writes them under their prompts; of a video, the middle frame."""
    images = {}
    for name, latents in rows.items():
        video = vae.decode(latents)
        images[name] = list(video[:, video.shape[1] // 2])
    labelled_grid(images, prompts).save(file)
