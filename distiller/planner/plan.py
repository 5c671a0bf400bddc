"""A plan: for every placement what it takes and how long an update lasts, whether it fits, and which one is fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from distiller.checkpoint.schedule import most_at_once
from distiller.config.placements import PLACEMENTS
from distiller.config.placements.base import Footprint, PlacementSpec
from distiller.config.recipe import Recipe
from distiller.errors import UserError
from distiller.launch.checks import Launch, possible_precisions
from distiller.launch.student_layout import StudentLayout, layout_of_launch
from distiller.planner.gpus import GIB
from distiller.planner.machines import Machine
from distiller.planner.planned_run import PlannedRun
from distiller.planner.remedies import changes
from distiller.tasks.base import Task
from distiller.tasks.interfaces import Cacheable, Plannable
from distiller.teachers.footprint import FILLED_SHARE
from distiller.teachers.rules import check_placement
from distiller.training.student_memory import MOMENTS, WEIGHTS
from distiller.training.update_plan import last_step_of, plan_updates


@final
@dataclass(frozen=True)
class PlannedPlacement:
    """One row of a plan.

    Attributes:
        why: why it does not fit or cannot run; empty where it fits.
        gpu_bytes: predicted peak on the GPU of each rank; empty where it cannot run.
        host_bytes: of each machine, the student's offloaded state and a checkpoint's copy included.
        disk_bytes: what the run leaves on its disk.
        step_ms: of an update; None on a machine without GPUs, and where it cannot run.
        stage_ms: of the stages before the loop that ask the teacher; None as above.
        bound_by: what an update's time goes to.
        remedy: the smallest change of the recipe with which it fits; empty where none is known.
    """

    name: str
    fits: bool
    why: str
    gpu_bytes: tuple[int, ...] = ()
    host_bytes: int = 0
    disk_bytes: int = 0
    step_ms: float | None = None
    stage_ms: float | None = None
    bound_by: str = ""
    remedy: str = ""


@final
@dataclass(frozen=True)
class Plan:
    """What `distiller plan` prints.

    Attributes:
        placements: those that can run come first, fastest first; then those that cannot.
        choice: the fastest of those that fit and that `auto` may choose; None where none fits.
        steps: updates of the whole run.
        cached_hours: of the whole run with a cache of the teacher's outputs, which is made first; None where the time
            is not known, or nothing can be cached.
    """

    machine: Machine
    layout: StudentLayout
    placements: tuple[PlannedPlacement, ...]
    choice: str | None
    steps: int
    cached_hours: float | None

    def hours(self, row: PlannedPlacement) -> float | None:
        """Of the whole run: the stages that ask the teacher, and the updates. None where the time is not known."""
        if row.step_ms is None or row.stage_ms is None:
            return None
        return (row.stage_ms + self.steps * row.step_ms) / 3.6e6


def make_plan(recipe: Recipe, task: Task[Any, Any], launch: Launch, machine: Machine) -> Plan:
    """Plans a run. Reads no weights, needs no GPU and does not communicate. Raises UserError for what cannot run.

    Args:
        task: the recipe's.
        launch: its `num_processes` are those of all machines.
    """
    run = plan_run(recipe, task, launch, machine)
    changed_runs = changes(run)
    rows = [_row(run, spec, changed_runs) for spec in PLACEMENTS.values()]
    rows.sort(key=lambda row: (not row.fits, row.step_ms is None, round(row.step_ms or 0.0), _rank(row.name, run)))
    asked = recipe.teacher.placement
    # A cache is chosen where the recipe names it: `auto` never does.
    candidates = [row for row in rows if row.fits and row.name == asked and not PLACEMENTS[asked].loads_teacher]
    candidates += [row for row in rows if row.fits and PLACEMENTS[row.name].is_auto_candidate]
    chosen = next(iter(candidates), None)
    return Plan(
        machine,
        run.layout,
        tuple(rows),
        None if chosen is None else chosen.name,
        run.steps,
        None if chosen is None or machine.gpu is None else _cached_hours(run, chosen),
    )


def _cached_hours(run: PlannedRun, chosen: PlannedPlacement) -> float | None:
    """The teacher answers once for each sample, or for each of its draws, and then the student trains alone."""
    task, recipe = run.task, run.recipe
    if not isinstance(task, Cacheable) or not task.needs_live_teacher:
        return None
    per_update = recipe.train.batch_size * run.layout.accumulation_steps * run.layout.num_processes
    epochs = -(-run.steps * per_update // task.num_samples)
    draws = min(recipe.cache.draws or epochs, epochs) if task.has_draws else 1
    asking_ms = (
        draws
        * task.num_samples
        * run.stage_pass_ms(PLACEMENTS[chosen.name], recipe.train.batch_size)
        / run.layout.num_processes
    )
    return (asking_ms + (chosen.stage_ms or 0.0) + run.steps * run.step_time(PLACEMENTS["cached"]).ms) / 3.6e6


def plan_run(recipe: Recipe, task: Task[Any, Any], launch: Launch, machine: Machine) -> PlannedRun:
    """The run of a recipe on a machine where it is not started. Raises UserError; see `make_plan`."""
    if launch.num_processes % machine.num_machines:
        raise UserError(
            f"{launch.num_processes} processes cannot be split over {machine.num_machines} machines evenly; give "
            "--gpus and --machines"
        )
    if machine.num_gpus and launch.num_processes > machine.num_gpus * machine.num_machines:
        raise UserError(
            f"{launch.num_processes} processes are planned for {machine.num_gpus * machine.num_machines} GPUs; give "
            "--gpus, or another launch file"
        )
    has_bfloat16 = machine.gpu is not None and machine.gpu.has_bfloat16
    precision = possible_precisions(recipe.train.mixed_precision, launch.mixed_precision)[0]
    if recipe.train.mixed_precision == "auto" and precision == "bf16" and not has_bfloat16:
        precision = "no"
    _check_gpu(recipe, machine, precision)
    layout = layout_of_launch(recipe, launch, precision)
    named = recipe.teacher.dtype
    dtype = getattr(torch, named) if named != "auto" else torch.bfloat16 if has_bfloat16 else torch.float32
    updates = plan_updates(recipe, task.num_samples, layout.accumulation_steps, launch.num_processes)
    return PlannedRun(recipe, task, machine, layout, dtype, last_step_of(recipe, updates))


def _check_gpu(recipe: Recipe, machine: Machine, precision: str) -> None:
    """Refuses (UserError) what this kind of GPU does not compute."""
    gpu = machine.gpu
    if gpu is None:
        return
    if precision == "bf16" and not gpu.has_bfloat16:
        raise UserError(f"train.mixed_precision is bf16, which {gpu.name} has not; choose fp16 or no")
    if recipe.teacher.dtype == "bfloat16" and not gpu.has_bfloat16:
        raise UserError(f"teacher.dtype is bfloat16, which {gpu.name} has not; choose float16 or float32")
    if recipe.teacher.quantization == "fp8" and not gpu.has_float8:
        raise UserError(f"teacher.quantization is fp8, which {gpu.name} has not; choose int8 or nf4")


def _rank(name: str, run: PlannedRun) -> int:
    """Where a placement stands among those of the same predicted time, by what was measured."""
    speed = PLACEMENTS[name].speed
    if speed is None:
        return 1000
    if not run.machine.num_gpus:
        return speed.on_cpus
    return speed.one_process if run.world.num_local_ranks == 1 else speed.on_gpus


@final
@dataclass(frozen=True)
class _Needs:
    """Memory that a placement takes; `why` it does not suffice, empty where it does."""

    gpu_bytes: tuple[int, ...]
    host_bytes: int
    why: str


def _needs(run: PlannedRun, spec: PlacementSpec[Any]) -> _Needs:
    options = spec.options.of(run.options(spec.name))
    needs = Footprint(0, 0) if spec.memory is None else spec.memory(run.sizes, options, run.world)
    gpu_bytes = _gpu_bytes(run, spec, options, needs)
    host_bytes = needs.host + run.state.host * run.world.num_local_ranks
    if not run.machine.num_gpus:
        # Ranks stand for GPUs: what would lie there is in host memory too.
        host_bytes += run.account.beside_teacher * run.world.num_local_ranks
    return _Needs(gpu_bytes, host_bytes, _shortage(run, gpu_bytes, host_bytes))


def _row(run: PlannedRun, spec: PlacementSpec[Any], changed_runs: Sequence[tuple[PlannedRun, str]]) -> PlannedPlacement:
    if why_not := _why_not(run, spec):
        return PlannedPlacement(spec.name, False, why_not)
    needs, time = _needs(run, spec), None if run.machine.gpu is None else run.step_time(spec)
    return PlannedPlacement(
        spec.name,
        not needs.why,
        needs.why,
        needs.gpu_bytes,
        needs.host_bytes,
        _disk_bytes(run),
        None if time is None else time.ms,
        None if time is None else _stage_ms(run, spec),
        "" if time is None else time.bound_by,
        _remedy(changed_runs, spec) if needs.why else "",
    )


def _stage_ms(run: PlannedRun, spec: PlacementSpec[Any]) -> float:
    passes, size = run.task.stage_passes() if isinstance(run.task, Plannable) and spec.loads_teacher else (0, 1)
    return passes * run.stage_pass_ms(spec, size) / run.layout.num_processes if passes else 0.0


def _why_not(run: PlannedRun, spec: PlacementSpec[Any]) -> str:
    """Why a placement cannot run here, whatever the memory; empty where it can."""
    if not run.task.needs_live_teacher:
        return "" if spec.name == "replicated" else "the run asks no teacher while it trains, wherever it would be"
    options = run.options(spec.name)
    if spec.memory is None and spec.loads_teacher:
        return "what it takes follows from the recipe's own map; train --dry-run measures it"
    if spec.name == "cached":
        return "" if run.recipe.teacher.cache else "no teacher.cache is given; `distiller cache` writes one"
    try:
        check_placement(options, run.layout.num_processes, run.layout.zero_stage is not None)
    except UserError as error:
        return str(error)
    own_gpus = getattr(options, "num_processes", 0) if spec.computes_elsewhere else 0
    if run.machine.num_gpus and own_gpus + run.world.num_local_ranks > run.machine.num_gpus:
        return (
            f"teacher.devices asks for {own_gpus} GPU(s) beside those of the {run.world.num_local_ranks} rank(s), and "
            f"there are {run.machine.num_gpus}"
        )
    return ""


def _gpu_bytes(run: PlannedRun, spec: PlacementSpec[Any], options: Any, needs: Footprint) -> tuple[int, ...]:
    """The predicted peak on the GPU of each rank."""
    count = run.layout.num_processes
    if not run.machine.num_gpus:
        return (0,) * count
    account, holder = run.account, None if spec.holder is None else spec.holder(options)
    if not run.task.needs_live_teacher:
        return (account.peak(0),) * count
    if holder is None:
        return (account.peak(needs.gpu, leaves_gpu=spec.leaves_gpu),) * count
    # The rank that answers for all computes with all ranks' samples at once.
    at_holder = account.peak(needs.gpu) + run.traced.teacher_peak * (count - 1)
    return tuple(at_holder if rank == holder else account.peak(0) for rank in range(count))


def _shortage(run: PlannedRun, gpu_bytes: tuple[int, ...], host_bytes: int) -> str:
    """Which memory does not suffice, in words; empty where all does."""
    machine = run.machine
    if machine.num_gpus and max(gpu_bytes) > machine.gpu_memory * FILLED_SHARE:
        usable = machine.gpu_memory * FILLED_SHARE
        return f"takes {max(gpu_bytes) / GIB:.1f} GiB, more than {FILLED_SHARE:.0%} of a GPU's: {usable / GIB:.1f}"
    if host_bytes > machine.host_memory:
        return f"takes {host_bytes / GIB:.1f} GiB of the {machine.host_memory / GIB:.1f} GiB of host memory"
    return ""


def _disk_bytes(run: PlannedRun) -> int:
    """Checkpoints that are there at once, and the exported student."""
    # Float32 weights and AdamW's two moments in each.
    return run.num_parameters * (WEIGHTS + (WEIGHTS + MOMENTS) * most_at_once(run.recipe.checkpoint))


def _remedy(changed_runs: Sequence[tuple[PlannedRun, str]], spec: PlacementSpec[Any]) -> str:
    """The first single change of the recipe with which the placement fits; empty where none makes it fit."""
    for changed, text in changed_runs:
        # Before a trace of the changed update, which takes seconds: what else there is may be too much.
        if changed.machine.num_gpus and _at_rest(changed, spec) > changed.machine.gpu_memory:
            continue
        if not _why_not(changed, spec) and not _needs(changed, spec).why:
            return text
    return ""


def _at_rest(run: PlannedRun, spec: PlacementSpec[Any]) -> int:
    """Bytes of the student's state and the teacher's weights on a GPU."""
    options = spec.options.of(run.options(spec.name))
    return (
        run.state.gpu
        - run.state.gradients
        + (0 if spec.memory is None else spec.memory(run.sizes, options, run.world).gpu)
    )
