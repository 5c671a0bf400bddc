"""`train --check`: recipe, files and launch file, without a launcher and without reading weights."""

from __future__ import annotations

from pathlib import Path

import torch

from distiller.build import check_run
from distiller.config.recipe import Recipe
from distiller.errors import UserError
from distiller.launch.accelerator import resolve_accumulation
from distiller.launch.checks import Launch, check_launch, possible_precisions, read_launch
from distiller.run_folder.output_dir import check_output_dir, is_finished_by_files
from distiller.session import fsdp_units
from distiller.tasks.interfaces import Checkable, Plannable, default_recipe, format_notice, notices_of
from distiller.teachers.rules import placement_notices
from distiller.training.update_plan import last_step_of, length_notices, plan_updates


def check(recipe: Recipe, launch_file: str | None, resume: bool = False) -> None:
    """Prints what was found, or raises UserError.

    Args:
        launch_file: the accelerate config file to validate, if any.
        resume: whether the run is to be continued, so that its folder may be there.
    """
    launch = Launch() if launch_file is None else read_launch(Path(launch_file))
    check_launch(recipe, launch)
    num_processes, fsdp = launch.num_processes, launch.fsdp
    warning = _check_fp16(recipe, launch)
    finished = f"ok: {recipe.output_dir} is already finished; nothing is left to do"
    try:
        task = check_run(recipe, num_processes, launch.under_deepspeed)
    except UserError:
        if resume and is_finished_by_files(recipe):
            print(finished)
            return
        raise
    plan = plan_updates(recipe, task.num_samples, resolve_accumulation(recipe, num_processes), num_processes)
    last_step = last_step_of(recipe, plan)
    # A run's folder holds the recipe with the teacher's defaults.
    if check_output_dir(default_recipe(task, recipe), resume, last_step):
        print(finished)
        return
    if fsdp is not None:
        fsdp_units(fsdp, task)
    looked = task.check_samples() if isinstance(task, Checkable) else None
    if warning is not None:
        print(f"warning: {warning}")
    of_placement = placement_notices(recipe.teacher, task.needs_live_teacher)
    of_length = length_notices(recipe, last_step)
    for notice in (*of_placement, *of_length, *notices_of(task)):
        print(format_notice(notice))
    found = [f"{task.num_samples} samples", f"teacher of {task.network.num_parameters():,} parameters", looked]
    num_passes = task.stage_passes()[0] if isinstance(task, Plannable) else 0
    if num_passes:
        found.append(f"{num_passes:,} of its forward passes, of a sample each, before the loop")
    print(f"ok: {', '.join(part for part in found if part is not None)}")


def _check_fp16(recipe: Recipe, launch: Launch) -> str | None:
    """UserError for fp16 on a CPU; a warning where the launch file is for another machine, which may have GPUs."""
    precisions = possible_precisions(recipe.train.mixed_precision, launch.mixed_precision)
    if precisions != ("fp16",) or torch.cuda.is_available():
        return None
    if launch.request is None:
        raise UserError(
            "train.mixed_precision is fp16, which needs a GPU, and this machine has none; choose bf16 or no, or give "
            "the launch file of the machine that has one, with --config_file"
        )
    return "train.mixed_precision is fp16, which needs a GPU, and this machine has none"
