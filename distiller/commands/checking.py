"""`train --check`: recipe, files and launch file, without a launcher and without reading weights."""

from __future__ import annotations

from pathlib import Path

import torch

from distiller.build import check_run, last_step_of, plan_updates
from distiller.config.recipe import Recipe
from distiller.errors import UserError
from distiller.launch.accelerator import resolve_accumulation
from distiller.launch.checks import check_json_precision, check_precision, check_request, possible_precisions
from distiller.launch.compile import check_compile
from distiller.launch.fsdp import check_offload, check_sharding, fsdp_of_file, wrapped_classes
from distiller.launch.request import LaunchRequest, deepspeed_settings, read_launch_file
from distiller.run_folder.output_dir import check_output_dir, is_finished_by_files
from distiller.tasks.interfaces import Checkable, default_recipe, format_notice, notices_of


def check(recipe: Recipe, launch_file: str | None, resume: bool = False) -> None:
    """Prints what was found, or raises UserError.

    Args:
        launch_file: the accelerate config file to validate, if any.
        resume: whether the run is to be continued, so that its folder may be there.
    """
    num_processes, under_deepspeed, fsdp, request = 1, False, None, None
    if launch_file is not None:
        request = read_launch_file(Path(launch_file))
        check_request(request)
        check_precision(recipe.train.mixed_precision, request.mixed_precision)
        num_processes, under_deepspeed = request.num_processes, request.distributed_type == "DEEPSPEED"
        fsdp = fsdp_of_file(Path(launch_file), num_processes)
        precisions = possible_precisions(recipe.train.mixed_precision, request.mixed_precision)
        if under_deepspeed:
            check_json_precision(deepspeed_settings(request), precisions)
        if fsdp is not None:
            check_sharding(fsdp, num_processes)
            check_offload(fsdp, precisions)
        check_compile(recipe, request.options, fsdp is not None and fsdp.version == 1)
    warning = _check_fp16(recipe, request)
    finished = f"ok: {recipe.output_dir} is already finished; nothing is left to do"
    try:
        task = check_run(recipe, num_processes, under_deepspeed)
    except UserError:
        if resume and is_finished_by_files(recipe):
            print(finished)
            return
        raise
    plan = plan_updates(recipe, task.num_samples, resolve_accumulation(recipe, num_processes), num_processes)
    # A run's folder holds the recipe with the teacher's defaults.
    if check_output_dir(default_recipe(task, recipe), resume, last_step_of(recipe, plan)):
        print(finished)
        return
    if fsdp is not None:
        wrapped_classes(fsdp, task.student_skeleton(), task.block_classes)
    looked = task.check_samples() if isinstance(task, Checkable) else None
    if warning is not None:
        print(f"warning: {warning}")
    for notice in notices_of(task):
        print(format_notice(notice))
    found = [f"{task.num_samples} samples", f"teacher of {task.network.num_parameters():,} parameters", looked]
    print(f"ok: {', '.join(part for part in found if part is not None)}")


def _check_fp16(recipe: Recipe, request: LaunchRequest | None) -> str | None:
    """UserError for fp16 on a CPU; a warning where the launch file is for another machine, which may have GPUs."""
    asked = "no" if request is None else request.mixed_precision
    if possible_precisions(recipe.train.mixed_precision, asked) != ("fp16",):
        return None
    if request is not None and request.use_cpu:
        raise UserError(f"train.mixed_precision is fp16, which needs a GPU, and {request.origin} says use_cpu: true")
    if torch.cuda.is_available():
        return None
    if request is None:
        raise UserError(
            "train.mixed_precision is fp16, which needs a GPU, and this machine has none; choose bf16 or no, or give "
            "the launch file of the machine that has one, with --config_file"
        )
    return "train.mixed_precision is fp16, which needs a GPU, and this machine has none"
