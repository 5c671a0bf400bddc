"""What a run is about to do, in ten lines or fewer, and what was predicted of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from distiller.config.placements import AUTO, PLACEMENTS
from distiller.session import Session
from distiller.teachers.base import Setup
from distiller.training.expectation import Expectation
from distiller.training.tracking import GIB

_NAME_WIDTH = 11


def expectation_of(setup: Setup, placement: str) -> Expectation | None:
    """What was predicted of each rank's GPU under a placement; None where it is not known of rank 0."""
    spec, teacher_bytes = PLACEMENTS.get(placement), setup.gpu_bytes.get(placement)
    # Under the others rank 0 holds another part than the fullest GPU, or answers for all.
    takes_the_same = spec is not None and spec.holder is None and not spec.uses_device_map
    if setup.update_bytes is None or teacher_bytes is None or not takes_the_same:
        return None
    return Expectation(setup.reserved_bytes + setup.update_bytes + teacher_bytes, setup.step_ms.get(placement))


def print_overview(session: Session[Any], setup: Setup, steps_done: int) -> None:
    """Prints the lines on rank 0, before any weight is read. Does not communicate."""
    if session.ranks.is_main:
        print("\n".join(f"{name:<{_NAME_WIDTH}}{text}" for name, text in _rows(session, setup, steps_done)), flush=True)


def _rows(session: Session[Any], setup: Setup, steps_done: int) -> list[tuple[str, str]]:
    recipe, task, plan, accelerator = session.recipe, session.task, session.plan, session.accelerator
    num_teacher, num_student = task.network.num_parameters(), task.student_skeleton().num_model_parameters()
    dtype = str(session.teacher_dtype).removeprefix("torch.")
    quantization = recipe.teacher.quantization
    form = dtype if quantization == "none" else f"{quantization}, the rest {dtype}"
    device = accelerator.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name(accelerator.device)
    compiled = [
        name
        for name, mode in (("student", session.student_compile_mode), ("teacher", setup.compile_mode))
        if mode != "none"
    ]
    dropped = f", of which the last {plan.dropped_per_epoch} in its order are dropped" if plan.dropped_per_epoch else ""
    rows = [
        ("teacher", f"{recipe.teacher.path}: {in_words(num_teacher)} parameters, {form}"),
        ("placement", _placement(session, setup)),
        ("student", f"{in_words(num_student)} parameters, {num_student / num_teacher:.3g} times the teacher's"),
        (
            "engine",
            f"{session.world.engine} on {accelerator.num_processes} x {device}, mixed precision "
            f"{session.world.mixed_precision}" + (f"; compiled: {' and '.join(compiled)}" if compiled else ""),
        ),
        (
            "updates",
            f"{session.last_step - steps_done:,}, each of {plan.samples_per_update} samples (batch {plan.batch_size} x "
            f"accumulation {plan.accumulation_steps} x {plan.world_size} processes)",
        ),
        ("data", f"{recipe.data.path or recipe.data.kind}: {plan.num_samples} samples an epoch{dropped}"),
    ]
    expected = expectation_of(setup, setup.options.placement)
    if expected is not None:
        total = torch.cuda.get_device_properties(accelerator.device).total_memory
        rows.append(("memory", f"{expected.peak_bytes / GIB:.2f} GiB of a GPU expected, of {total / GIB:.1f}"))
        if expected.step_ms is not None:
            hours = expected.step_ms * (session.last_step - steps_done) / 3.6e6
            rows.append(("time", f"{expected.step_ms:,.0f} ms an update expected, {hours:.2f} h for the loop"))
    return [*rows, ("output", str(Path(recipe.output_dir)))]


def _placement(session: Session[Any], setup: Setup) -> str:
    name = setup.options.placement
    if not session.task.needs_live_teacher:
        return "none: the loop does not ask the teacher"
    return f"{name}, chosen by auto" if session.recipe.teacher.placement == AUTO else name


def in_words(count: int) -> str:
    """A number of parameters with three digits, such as 14.3 B or 397 M."""
    for size, unit in ((1e9, " B"), (1e6, " M")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:,}"
