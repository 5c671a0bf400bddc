"""What the recipe, the teacher and the student must agree on, checked by their descriptions (UserError)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distiller.diffusion_config import DiffusionOptions, DiffusionRecipe
from distiller.digits import IMAGE_SIZE
from distiller.errors import UserError
from distiller.wan.pipeline import WanFiles


def check_patches(
    task: DiffusionOptions, files: WanFiles, student: Mapping[str, Any], latent_shape: tuple[int, int, int, int]
) -> None:
    """Both networks' patches divide the latents and stay within their position tables."""
    teachers = {f"teacher {name}": config for name, config in files.transformer_configs.items()}
    for owner, config in {"student": student, **teachers}.items():
        patch, limit = config["patch_size"], config["rope_max_seq_len"]
        for name, size, step in zip(("num_frames", "height", "width"), latent_shape[1:], patch, strict=True):
            if size % step:
                raise UserError(
                    f"the {owner}'s patch_size {list(patch)} does not divide the {size} latents of task.{name} "
                    f"{getattr(task, name)}; change one of them"
                )
            if size // step > limit:
                raise UserError(
                    f"task.{name} {getattr(task, name)} makes {size // step} patches and the {owner}'s "
                    f"rope_max_seq_len is {limit}; lower it"
                )


def check_feature_blocks(task: DiffusionOptions, files: WanFiles, student: Mapping[str, Any]) -> None:
    """Matched blocks exist, and both networks see the same tokens."""
    features = task.losses.features
    teacher_layers = files.transformer_configs["transformer"]["num_layers"]
    for key, numbers, layers in (
        ("student_blocks", features.student_blocks, student["num_layers"]),
        ("teacher_blocks", features.teacher_blocks, teacher_layers),
    ):
        for number in numbers:
            if number >= layers:
                raise UserError(
                    f"task.losses.features.{key} names block {number}; there are {layers}, numbered from 0 to "
                    f"{layers - 1}"
                )
    if features.weight and list(student["patch_size"]) != list(files.transformer_configs["transformer"]["patch_size"]):
        raise UserError("task.losses.features needs equal patch sizes: the student's tokens would not match")


def check_guidance(recipe: DiffusionRecipe, files: WanFiles) -> None:
    """Scales of a second expert need one."""
    given = {
        "task.guidance.scale_2": recipe.task.guidance.scale_2,
        "sampling.guidance_scale_2": recipe.sampling.guidance_scale_2,
    }
    for key, scale in given.items():
        if scale is not None and files.boundary_ratio is None:
            raise UserError(f"{key} is {scale:g} and the teacher has one transformer; remove it")


def check_judge(recipe: DiffusionRecipe) -> None:
    """The judge of digits looks at pictures of one size."""
    size = recipe.task.height, recipe.task.width
    if recipe.evaluation.judge == "digits" and size != (IMAGE_SIZE, IMAGE_SIZE):
        raise UserError(
            f"evaluation.judge=digits looks at {IMAGE_SIZE} x {IMAGE_SIZE} pictures, given task.height {size[0]} "
            f"and task.width {size[1]}; change them, or set it to none"
        )
