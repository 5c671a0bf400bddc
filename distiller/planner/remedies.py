"""The smallest change of a recipe, or of its launch file, with which a placement fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from distiller.launch.deepspeed import Offload
from distiller.launch.fsdp import fsdp_of_file
from distiller.launch.student_layout import StudentLayout
from distiller.planner.planned_run import PlannedRun
from distiller.storage.packaged_files import launch_files_dir

SHARDED = ("zero2", "fsdp2", "zero3_offload")
"""Launch files that are proposed in place of DDP's: each keeps less of the student's state on a GPU."""

OFFLOADED = {
    "zero2": ("deepspeed-zero2", Offload()),
    "zero3_offload": ("deepspeed-zero3-offload", Offload("cpu", "cpu")),
}
"""Of these, DeepSpeed's -> engine, and what it offloads."""


def changes(run: PlannedRun) -> list[tuple[PlannedRun, str]]:
    """(the changed run, the change in words), what costs the least time first. They share their traces."""
    recipe, layout = run.recipe, run.layout
    train, teacher = recipe.train, recipe.teacher
    found: list[tuple[PlannedRun, str]] = []

    def add(text: str, layout: StudentLayout = layout, **sections: Any) -> None:
        found.append((replace(run, recipe=recipe.model_copy(update=sections), layout=layout), text))

    has_bfloat16 = run.machine.gpu is not None and run.machine.gpu.has_bfloat16
    if run.teacher_dtype is torch.float32 and has_bfloat16:
        found.append((replace(run, teacher_dtype=torch.bfloat16), "teacher.dtype=bfloat16"))
    if layout.engine == "ddp":
        for name in SHARDED[:2]:
            add(f"the launch file {name}.yaml", _layout_of(name, run))
    if not train.gradient_checkpointing:
        changed = train.model_copy(update={"gradient_checkpointing": True})
        add("train.gradient_checkpointing=true", train=changed)
    if teacher.quantization == "none":
        add("teacher.quantization=int8", teacher=teacher.model_copy(update={"quantization": "int8"}))
    size = train.batch_size
    factor = next((factor for factor in range(2, size + 1) if size % factor == 0), None)
    if factor is not None:
        samples = size * layout.accumulation_steps * layout.num_processes
        values = {"batch_size": size // factor, "gradient_accumulation_steps": None, "samples_per_update": samples}
        more = replace(layout, accumulation_steps=layout.accumulation_steps * factor)
        text = f"train.batch_size={size // factor} train.samples_per_update={samples}"
        add(text, more, train=train.model_copy(update=values))
    if layout.engine == "ddp":
        add(f"the launch file {SHARDED[-1]}.yaml", _layout_of(SHARDED[-1], run))
    return found


def _layout_of(name: str, run: PlannedRun) -> StudentLayout:
    """The layout of the run under a packaged launch file.

    DeepSpeed's are not read: the JSON that they name is relative to the working folder.
    """
    if name in OFFLOADED:
        engine, offload = OFFLOADED[name]
        return replace(run.layout, engine=engine, offload=offload)
    file = launch_files_dir() / "accelerate_configs" / f"{name}.yaml"
    fsdp = fsdp_of_file(file, run.layout.num_processes)
    assert fsdp is not None
    return replace(run.layout, engine=fsdp.engine, fsdp=fsdp)
