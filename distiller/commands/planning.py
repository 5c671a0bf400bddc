"""`distiller plan`: what a run will take on this machine or another one, before any weight is read."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distiller.build import build_task
from distiller.config.placements import PLACEMENTS
from distiller.config.recipe import Recipe
from distiller.errors import UserError
from distiller.launch.checks import Launch, check_launch
from distiller.launch.fsdp import fsdp_of_file
from distiller.launch.request import LaunchRequest, read_launch_file
from distiller.planner.chart import check_chart, write_chart
from distiller.planner.gpus import GIB
from distiller.planner.kernel_times import FORWARD_SHARE
from distiller.planner.machines import Machine, plan_machine
from distiller.planner.plan import Plan, PlannedPlacement, make_plan
from distiller.planner.rates import keep_rates, measure_rates
from distiller.storage.saved_model import weights_may_be_missing
from distiller.tasks.interfaces import Plannable, default_recipe

HEADS = ("placement", "fits", "GPU GiB", "host GiB", "ms an update", "hours", "bound by, or why not")


def plan(recipe: Recipe, options: argparse.Namespace) -> None:
    """Prints a plan of the recipe, as a table or as JSON. Raises UserError."""
    if options.plot is not None:
        check_chart(options.plot)
    if options.measure:
        _measure(is_described=(options.machine, options.gpu) != (None, None))
    machine = plan_machine(
        options.machine, options.gpus, options.gpu_memory, options.gpu, options.host_memory, options.machines
    )
    is_described = options.gpus is not None or options.machine is not None
    launch = _launch(options.config_file, machine, options.processes, is_described=is_described)
    with weights_may_be_missing():
        task = build_task(recipe)
        if not isinstance(task, Plannable):
            raise UserError(f"task.kind {recipe.task.kind} cannot be planned; run train --dry-run instead")
        recipe = default_recipe(task, recipe)
        check_launch(recipe, launch)
        found = make_plan(recipe, task, launch, machine)
    if options.plot is not None:
        try:
            write_chart(found, options.plot)
        except OSError as error:
            raise UserError(f"--plot {options.plot}: {error.strerror}; give a file that can be written") from error
    if options.json:
        print(json.dumps(to_json(found), indent=2))
    else:
        print("\n".join(to_lines(found, recipe)))


def _measure(*, is_described: bool) -> None:
    """Measures this machine's rates and keeps them. Raises UserError."""
    if is_described:
        raise UserError("--measure is of this machine; leave --machine and --gpu out")
    if not torch.cuda.is_available():
        raise UserError("--measure needs a GPU, and this machine has none; say which kind to plan for: --gpu NAME")
    try:
        rates = measure_rates(torch.device("cuda", 0))
        file = keep_rates(torch.cuda.get_device_name(0), rates)
    except torch.OutOfMemoryError as error:
        raise UserError(
            "--measure takes 2 GiB of the GPU, which are not free; try when no other program runs"
        ) from error
    except OSError as error:
        text = f"--measure keeps rates in the user's cache folder: {error.strerror}; set XDG_CACHE_HOME to another one"
        raise UserError(text) from error
    print(
        f"measured, and kept in {file}: {FORWARD_SHARE * rates.short_flops / 1e12:.0f} TFLOP/s in 16 bits and "
        f"{FORWARD_SHARE * rates.float32_flops / 1e12:.0f} in 32, {FORWARD_SHARE * rates.bandwidth / 1e9:,.0f} GB/s of "
        f"GPU memory, {rates.host / 1e9:.0f} GB/s from the host, {1e3 * rates.launch_ms:.0f} us to start an operation",
        file=sys.stderr,
    )


def _launch(config_file: str | None, machine: Machine, processes: int | None, *, is_described: bool) -> Launch:
    """The launch file's engine with as many processes as there are GPUs; DDP, or one process, without a file.

    `processes`: of all machines, where the command line says so; `is_described`: whether it says how many GPUs.
    """
    count = machine.num_gpus * machine.num_machines if machine.num_gpus else None
    if processes is not None:
        if processes < 1:
            raise UserError(f"--processes is {processes}; it is at least 1")
        count, is_described = processes, True
    if config_file is not None:
        file = Path(config_file)
        request = read_launch_file(file, count if is_described else None)
        if request.num_machines not in (1, machine.num_machines):
            raise UserError(
                f"{file.name} is of {request.num_machines} machines and --machines {machine.num_machines}; give "
                f"--machines {request.num_machines}, with the GPUs of each"
            )
        request = replace(request, num_machines=machine.num_machines)
        return Launch(request, request.num_processes, fsdp_of_file(file, request.num_processes))
    processes = count or 1
    kind = "MULTI_GPU" if processes > 1 else "NO"
    return Launch(LaunchRequest("distiller plan", processes, kind, False, "no", machine.num_machines), processes)


def to_json(found: Plan) -> dict[str, Any]:
    """The plan as JSON; sizes in GiB, times in milliseconds and hours."""
    return {
        "machine": found.machine.describe(),
        "engine": found.layout.engine,
        "num_processes": found.layout.num_processes,
        "steps": found.steps,
        "placements": [_row_to_json(found, row) for row in found.placements],
        "choice": found.choice,
        "cached_hours": None if found.cached_hours is None else round(found.cached_hours, 3),
    }


def _row_to_json(found: Plan, row: PlannedPlacement) -> dict[str, Any]:
    hours = found.hours(row)
    return {
        "name": row.name,
        "fits": row.fits,
        "why": row.why,
        "gpu_gib_per_rank": [round(num_bytes / GIB, 3) for num_bytes in row.gpu_bytes],
        "host_gib": round(row.host_bytes / GIB, 3),
        "disk_gib": round(row.disk_bytes / GIB, 3),
        "predicted_step_ms": None if row.step_ms is None else round(row.step_ms, 1),
        "bound_by": row.bound_by,
        "hours": None if hours is None else round(hours, 3),
        "gpu_hours": None if hours is None else round(hours * found.layout.num_processes, 3),
        "remedy": row.remedy,
    }


def to_lines(found: Plan, recipe: Recipe) -> list[str]:
    """The plan as text."""
    layout, steps = found.layout, f"{found.steps:,} updates"
    head = (
        f"{found.machine.describe()}; {layout.num_processes} process{'es' if layout.num_processes > 1 else ''} under "
        f"{layout.engine}, {layout.mixed_precision if layout.mixed_precision != 'no' else 'float32'}; {steps}"
    )
    rows = [HEADS, *(_cells(found, row) for row in found.placements)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS) - 1)]
    table = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    said = [_choice(found, recipe), *_cache(found), *_older_rule(found)]
    if sum(bool(row.gpu_bytes) for row in found.placements) == 1:
        said = ["the run asks no teacher while it trains: its place does not matter"]
    return [head, *(line.rstrip() for line in table), *said]


def _cells(found: Plan, row: PlannedPlacement) -> Sequence[str]:
    if not row.gpu_bytes:
        return row.name, "no", "", "", "", "", row.why
    hours = found.hours(row)
    gpu = f"{max(row.gpu_bytes) / GIB:.2f}" if found.machine.num_gpus else ""
    remedy = f"; it fits with {row.remedy}" if row.remedy else ""
    return (
        row.name,
        "yes" if row.fits else "no",
        gpu,
        f"{row.host_bytes / GIB:.2f}",
        "" if row.step_ms is None else f"{row.step_ms:,.0f}",
        "" if hours is None else f"{hours:,.2f}",
        row.bound_by if row.fits else f"{row.why}{remedy}",
    )


def _choice(found: Plan, recipe: Recipe) -> str:
    if found.choice is None:
        return "no placement fits; see what each would need"
    fitting = [row for row in found.placements if row.fits and PLACEMENTS[row.name].loads_teacher]
    others = [row for row in fitting if row.name != found.choice and PLACEMENTS[row.name].is_auto_candidate][:2]
    named = ", ".join(f"{row.name}{_ms(row)}" for row in others)
    chosen = next(row for row in found.placements if row.name == found.choice)
    if not PLACEMENTS[found.choice].loads_teacher:
        return f"the recipe reads the teacher's answers from a cache{_ms(chosen)}"
    text = f"auto chooses {found.choice}{_ms(chosen)}: the fastest that fits" + (f"; next {named}" if named else "")
    asked = recipe.teacher.placement
    return text if asked in ("auto", found.choice) else f"{text}; the recipe says {asked}"


def _cache(found: Plan) -> list[str]:
    """Advice to ask the teacher once, where that saves a twentieth of the hours."""
    chosen = next((row for row in found.placements if row.name == found.choice), None)
    hours = None if chosen is None else found.hours(chosen)
    if hours is None or found.cached_hours is None or found.cached_hours > 0.95 * hours or hours < 0.1:
        return []
    return [
        f"with `distiller cache` first, the run takes {found.cached_hours:,.2f} h in place of {hours:,.2f}: the "
        "teacher answers once for each sample"
    ]


def _older_rule(found: Plan) -> list[str]:
    """What the older trainer's rule would have chosen: the fastest was not asked for."""
    older = "balanced" if found.machine.num_gpus > 1 else "cpu"
    row = next(row for row in found.placements if row.name == older)
    if found.choice is None or found.choice == older or not row.gpu_bytes or not PLACEMENTS[found.choice].loads_teacher:
        return []
    return [f"the older trainer's rule (two GPUs or more: balanced, else cpu) would choose {older}{_ms(row)}"]


def _ms(row: PlannedPlacement) -> str:
    return "" if row.step_ms is None else f" ({row.step_ms:,.0f} ms)"
