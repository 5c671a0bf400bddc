"""Checks, from configs alone, that recipe, teacher and student fit together; a failed check raises UserError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distiller.config.diffusion import DiffusionOptions, DiffusionRecipe
from distiller.diffusion.architecture import LatentShape
from distiller.diffusion.family import Family
from distiller.diffusion.sampling import scale_of
from distiller.errors import UserError, shown

MIN_SHARE_OF_PIXELS = 1 / 4
"""Share of its training size, in pixels, below which a network generates poorly: a rule of thumb, half of each side."""


def check_sizes(task: DiffusionOptions, family: Family, student: Mapping[str, Any], shape: LatentShape) -> None:
    """Raises UserError unless the student and all networks of the teacher can take latents of this shape."""
    teachers = {f"teacher {name}": config for name, config in family.files.configs.items()}
    for owner, config in {"student": student, **teachers}.items():
        family.architecture.check_size(owner, config, task, shape)


def check_feature_blocks(
    task: DiffusionOptions, family: Family, student: Mapping[str, Any], shape: LatentShape
) -> None:
    """Raises UserError unless matched blocks exist and both of a pair have the same number of tokens."""
    features, architecture = task.losses.features, family.architecture
    for key, blocks, config in (
        ("student_blocks", features.student_blocks, student),
        ("teacher_blocks", features.teacher_blocks, family.teacher_config),
    ):
        count = len(architecture.block_names(config))
        for block in blocks:
            if block >= count:
                raise UserError(
                    f"task.losses.features.{key} names block {block}; there are {count}, numbered from 0 to {count - 1}"
                )
    if not features.weight:
        return
    for student_block, teacher_block in zip(features.student_blocks, features.teacher_blocks, strict=True):
        student_tokens = architecture.feature_shape(student, student_block, shape)[0]
        teacher_tokens = architecture.feature_shape(family.teacher_config, teacher_block, shape)[0]
        if student_tokens != teacher_tokens:
            raise UserError(
                f"task.losses.features needs equal patch sizes and resolutions: the student's block {student_block} "
                f"sees {student_tokens} tokens and the teacher's block {teacher_block} sees {teacher_tokens}"
            )


def check_guidance(recipe: DiffusionRecipe, family: Family) -> None:
    """Raises UserError for guidance scales of a second expert if the teacher has one network."""
    given = {
        "task.guidance.scale_2": recipe.task.guidance.scale_2,
        "sampling.guidance_scale_2": recipe.sampling.guidance_scale_2,
    }
    for key, scale in given.items():
        if scale is not None and family.files.boundary_ratio is None:
            raise UserError(f"{key} is {scale:g} and the teacher has one transformer; remove it")


def guidance_notes(recipe: DiffusionRecipe) -> list[str]:
    """Notices about guidance scales that have no effect, and about the student's scales that differ from the teacher's.

    The student is compared with samples of the teacher at `sampling.guidance_scale`, and learns `task.guidance.scale`.
    """
    guidance, sampling = recipe.task.guidance, recipe.sampling
    notes, second = [], sampling.guidance_scale_2
    if second is not None and scale_of(sampling.scales, (1,)) != second:
        notes.append(
            f"sampling.guidance_scale_2 {second:g} has no effect while sampling.guidance_scale is at most 1, given "
            f"{sampling.scales[0]:g}: as in the pipeline, neither transformer is guided"
        )
    if guidance.scale is None:
        return [*notes, *_unlearnt_guidance(recipe)]
    if isinstance(guidance.scale, tuple):
        return notes
    pairs = [("scale", guidance.scale, "guidance_scale", 0)]
    if guidance.scale_2 is not None:
        pairs.append(("scale_2", guidance.scale_2, "guidance_scale_2", 1))
    for key, learnt, other, module in pairs:
        own, drawn = sampling.scales[module], scale_of(sampling.scales, (module,))
        if learnt != drawn:
            unguided = ", which draws without guidance" if drawn != own else ""
            notes.append(
                f"task.guidance.{key} is {learnt:g} and sampling.{other} {own:g}{unguided}: rollout, samples and "
                "evaluation have the teacher draw at the second, and the student learns the first; set both alike to "
                "compare them"
            )
    return notes


def size_notes(recipe: DiffusionRecipe, family: Family) -> list[str]:
    """A warning if the recipe's size is so far below the teacher's training size that its pictures will be poor."""
    # Without `sample_size` the training size is unknown; the recipe gives both sides then.
    if not family.default_size_is_training_size or family.teacher_config["sample_size"] is None:
        return []
    _, height, width = recipe.task.size
    try:
        _, training_height, training_width = family.default_size()
    except UserError:
        # A size that does not follow from the files is refused only where the recipe leaves it out. Here it does not.
        return []
    if MIN_SHARE_OF_PIXELS * training_height * training_width <= height * width:
        return []
    return [
        f"warning: task.height {height} and task.width {width} are less than a quarter of the {training_height} x "
        f"{training_width} pixels for which this teacher's config.json says it was made: its drawings will be poor; "
        "leave both out to have its own"
    ]


def _unlearnt_guidance(recipe: DiffusionRecipe) -> list[str]:
    """A warning if sampling guides the student by predictions that it is not trained to make."""
    scale, second = recipe.sampling.scales[0], recipe.sampling.guidance_scale_2
    task = recipe.task
    # `condition_dropout` replaces prompts by the empty prompt.
    is_learnt = task.condition_dropout > 0 and not task.guidance.negative_prompt
    if scale <= 1 or task.targets == "stored" or is_learnt:
        return []
    keys = f"task.guidance.scale={scale:g}" + (f" and scale_2={second:g}" if second is not None else "")
    if task.guidance.negative_prompt:
        learnt = "prompts of the data" + (" and of the empty one" if task.condition_dropout else "")
        said = f"those of task.guidance.negative_prompt {shown(task.guidance.negative_prompt)}"
        instead = f"task.guidance.negative_prompt='' with task.condition_dropout={task.condition_dropout or 0.1:g}"
        return [
            f"warning: drawings are guided (sampling.guidance_scale {scale:g}) and the student learns predictions of "
            f"the {learnt} alone: {said}, by which it is then guided, stay untrained; set {keys}, and it learns guided "
            f"predictions and draws in one pass, or {instead}"
        ]
    return [
        f"warning: drawings are guided (sampling.guidance_scale {scale:g}) and the student learns predictions with a "
        "prompt alone: those without one, by which it is then guided, stay untrained; set "
        f"{keys}, and it learns guided predictions and draws in one pass, or task.condition_dropout=0.1"
    ]
