"""A plan: for every placement what it takes and how long an update lasts, whether it fits, and which one is fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from distiller.config.placements import PLACEMENTS
from distiller.config.placements.base import Footprint, PlacementSpec, Sizes, TeacherTime, TeacherWork, World
from distiller.config.recipe import Recipe
from distiller.config.teacher import Teacher
from distiller.errors import UserError
from distiller.launch.block_compilation import MIN_UPDATES
from distiller.launch.checks import Launch, possible_precisions
from distiller.launch.compile import NEVER_COMPILED
from distiller.launch.student_layout import StudentLayout, layout_of_launch
from distiller.planner.account import MARGIN, Account, make_account
from distiller.planner.kernel_times import kernels_ms, optimizer_ms
from distiller.planner.machines import GIB, Machine
from distiller.planner.traced_update import TracedUpdate, trace_update
from distiller.tasks.base import Task
from distiller.tasks.interfaces import Plannable, ReplicatesHead
from distiller.teachers.footprint import planned_sizes
from distiller.teachers.rules import check_placement
from distiller.training.student_memory import WEIGHTS, StudentState, student_state
from distiller.training.update_plan import last_step_of, plan_updates

QUANTIZED_SPEED = {"none": 1.0, "fp8": 1.6, "int8": 1.0, "nf4": 0.8}
"""How many times as fast a teacher's products are; of fp8 1.4 to 1.6 was measured (docs/performance.md)."""


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
        stage_passes: of the teacher, of one sample each, before the loop.
        pass_ms: a sample's share of a pass of the teacher; None on a machine without GPUs.
    """

    machine: Machine
    layout: StudentLayout
    placements: tuple[PlannedPlacement, ...]
    choice: str | None
    steps: int
    stage_passes: int
    pass_ms: float | None

    def hours(self, row: PlannedPlacement) -> float | None:
        """Of the whole run: the stages that ask the teacher, and the updates. None where the time is not known."""
        if row.step_ms is None or self.pass_ms is None:
            return None
        stages_ms = self.stage_passes * self.pass_ms / self.layout.num_processes
        return (stages_ms + self.steps * row.step_ms) / 3.6e6


@final
@dataclass(frozen=True)
class _Run:
    """A run that is planned: the recipe and what follows from it on a machine."""

    recipe: Recipe
    task: Task[Any, Any]
    launch: Launch
    machine: Machine
    layout: StudentLayout
    teacher_dtype: torch.dtype
    sizes: Sizes
    state: StudentState
    traced: TracedUpdate
    steps: int

    @property
    def account(self) -> Account:
        head = self.task.replicated_head_bytes(self.teacher_dtype) if isinstance(self.task, ReplicatesHead) else 0
        return make_account(self.state, self.layout, self.traced, head, self.recipe.teacher.prefetch_steps)

    @property
    def world(self) -> World:
        local = max(self.layout.num_processes // self.machine.num_machines, 1)
        return World(self.layout.num_processes, local, self.machine.num_gpus)

    def options(self, name: str) -> Teacher:
        """The recipe's `teacher` section with this placement."""
        return self.recipe.teacher.model_copy(update={"placement": name})


def make_plan(recipe: Recipe, task: Task[Any, Any], launch: Launch, machine: Machine) -> Plan:
    """Plans a run. Reads no weights, needs no GPU and does not communicate. Raises UserError for what cannot run at all.

    Args:
        task: the recipe's.
        launch: its `num_processes` are those of all machines.
    """
    run = _open(recipe, task, launch, machine)
    rows = [_row(run, spec) for spec in PLACEMENTS.values() if spec.memory is not None or spec.name == "cached"]
    rows.sort(key=lambda row: (not row.fits, row.step_ms is None, row.step_ms or 0.0, _rank(row.name, run)))
    fitting = [row.name for row in rows if row.fits and PLACEMENTS[row.name].is_auto_candidate]
    asked = recipe.teacher.placement
    pass_ms = None if machine.gpu is None else _teacher_work(run, "replicated").pass_ms / recipe.train.batch_size
    return Plan(
        machine,
        run.layout,
        tuple(rows),
        asked if asked == "cached" else next(iter(fitting), None),
        run.steps,
        task.stage_passes() if isinstance(task, Plannable) else 0,
        pass_ms,
    )


def _open(recipe: Recipe, task: Task[Any, Any], launch: Launch, machine: Machine) -> _Run:
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
    layout = layout_of_launch(recipe, launch, precision)
    named = recipe.teacher.dtype
    dtype = getattr(torch, named) if named != "auto" else torch.bfloat16 if has_bfloat16 else torch.float32
    steps = last_step_of(
        recipe, plan_updates(recipe, task.num_samples, layout.accumulation_steps, launch.num_processes)
    )
    compiles = (
        machine.gpu is not None
        and not layout.engine.startswith(tuple(NEVER_COMPILED))
        and _is_compiled(recipe.train.compile, steps)
    )
    recomputes = recipe.train.gradient_checkpointing or (layout.fsdp is not None and layout.fsdp.recomputes)
    traced = trace_update(
        task,
        recipe.train.batch_size,
        dtype,
        layout.weights_dtype,
        layout.autocast_dtype,
        recomputes=recomputes,
        compiles=compiles,
    )
    state = student_state(task.student_skeleton().num_trained_parameters(), recipe, layout)
    sizes = planned_sizes(task.network, dtype, recipe.teacher.quantization)
    return _Run(recipe, task, launch, machine, layout, dtype, sizes, state, traced, steps)


def _is_compiled(asked: str, steps: int) -> bool:
    return asked != "none" and (asked != "auto" or steps >= MIN_UPDATES)


def _rank(name: str, run: _Run) -> int:
    """Where a placement stands among those of the same predicted time, by what was measured."""
    speed = PLACEMENTS[name].speed
    if speed is None:
        return 1000
    if not run.machine.num_gpus:
        return speed.on_cpus
    return speed.one_process if run.world.num_local_ranks == 1 else speed.on_gpus


def _row(run: _Run, spec: PlacementSpec[Any]) -> PlannedPlacement:
    why_not = _why_not(run, spec)
    if why_not:
        return PlannedPlacement(spec.name, False, why_not)
    options = spec.options.of(run.options(spec.name))
    needs = Footprint(0, 0) if spec.memory is None else spec.memory(run.sizes, options, run.world)
    gpu_bytes = _gpu_bytes(run, spec, options, needs)
    host_bytes = needs.host + run.state.host * run.world.num_local_ranks
    if not run.machine.num_gpus:
        # Ranks stand for GPUs: what would lie there is in host memory too.
        host_bytes += run.account.beside_teacher * run.world.num_local_ranks
    why = _shortage(run, gpu_bytes, host_bytes)
    time = None if run.machine.gpu is None else _step(run, spec, options)
    row = PlannedPlacement(
        spec.name,
        not why,
        why,
        gpu_bytes,
        host_bytes,
        _disk_bytes(run),
        None if time is None else time.ms,
        "" if time is None else time.bound_by,
    )
    return row if row.fits else replace(row, remedy=_remedy(run, spec))


def _why_not(run: _Run, spec: PlacementSpec[Any]) -> str:
    """Why a placement cannot run here, whatever the memory; empty where it can."""
    if not run.task.needs_live_teacher:
        return "" if spec.name == "replicated" else "the run asks no teacher while it trains"
    options = run.options(spec.name)
    if spec.name == "cached":
        return "" if run.recipe.teacher.cache else "no teacher.cache is given; `distiller cache` writes one"
    try:
        check_placement(options, run.layout.num_processes, run.layout.zero_stage is not None)
    except UserError as error:
        return str(error)
    own_gpus = getattr(options, "num_processes", 0) if spec.computes_elsewhere else 0
    if run.machine.num_gpus and own_gpus + run.world.num_local_ranks > run.machine.num_gpus:
        return f"its {own_gpus} GPU and the ranks' {run.world.num_local_ranks} are more than the {run.machine.num_gpus}"
    return ""


def _gpu_bytes(run: _Run, spec: PlacementSpec[Any], options: Any, needs: Footprint) -> tuple[int, ...]:
    """The predicted peak on the GPU of each rank."""
    count = run.layout.num_processes
    if not run.machine.num_gpus:
        return (0,) * count
    account, holder = run.account, None if spec.holder is None else spec.holder(options)
    if not run.task.needs_live_teacher:
        return (account.peak(0),) * count
    if holder is None:
        return (account.peak(needs.gpu),) * count
    # The rank that answers for all computes with all ranks' samples at once.
    at_holder = account.peak(needs.gpu) + run.traced.teacher_peak * (count - 1)
    return tuple(at_holder if rank == holder else account.peak(0) for rank in range(count))


def _shortage(run: _Run, gpu_bytes: tuple[int, ...], host_bytes: int) -> str:
    """Which memory does not suffice, in words; empty where all does."""
    machine = run.machine
    if machine.num_gpus and max(gpu_bytes) * MARGIN > machine.gpu_memory:
        return f"takes {max(gpu_bytes) / GIB:.1f} GiB of the {machine.gpu_memory / GIB:.1f} GiB of a GPU"
    if host_bytes > machine.host_memory:
        return f"takes {host_bytes / GIB:.1f} GiB of the {machine.host_memory / GIB:.1f} GiB of host memory"
    return ""


def _teacher_work(run: _Run, name: str) -> TeacherWork:
    assert run.machine.gpu is not None
    spec, teacher = PLACEMENTS[name], run.recipe.teacher
    under_zero = run.layout.zero_stage is not None
    why_not = spec.why_not_compiled or (spec.why_not_compiled_beside_deepspeed if under_zero else "")
    is_compiled = not why_not and _is_compiled(teacher.compile, run.steps)
    speed = QUANTIZED_SPEED[teacher.quantization]
    pass_ms = kernels_ms(run.traced.teacher_kernels, run.machine.gpu, is_compiled=is_compiled, product_speed=speed)
    return TeacherWork(run.layout.accumulation_steps, pass_ms)


def _step(run: _Run, spec: PlacementSpec[Any], options: Any) -> TeacherTime | None:
    """The time of an update, and what most of it goes to."""
    assert run.machine.gpu is not None and spec.time is not None
    teacher = TeacherTime(0.0)
    if run.task.needs_live_teacher:
        teacher = spec.time(_teacher_work(run, spec.name), run.sizes, options, run.world, run.machine.links)
    student_ms = _student_ms(run)
    others = optimizer_ms(run.state, run.layout, run.machine.gpu)
    if run.recipe.teacher.prefetch_steps:
        # On one GPU both share its units: the longer of both is a limit that is reached where one waits for a link.
        shares_gpu = teacher.bound_by == TeacherTime(0.0).bound_by and not spec.computes_elsewhere
        ms = teacher.ms + student_ms if shares_gpu else max(teacher.ms, student_ms)
    else:
        ms = teacher.ms + student_ms
    bound_by = f"teacher: {teacher.bound_by}" if teacher.ms > student_ms + others else "student"
    return TeacherTime(ms + others, bound_by)


def _student_ms(run: _Run) -> float:
    assert run.machine.gpu is not None
    compiles = not run.layout.engine.startswith(tuple(NEVER_COMPILED)) and _is_compiled(
        run.recipe.train.compile, run.steps
    )
    once = kernels_ms(run.traced.student_kernels, run.machine.gpu, is_compiled=compiles)
    return once * run.layout.accumulation_steps


def _disk_bytes(run: _Run) -> int:
    """Checkpoints that are there at once, and the exported student."""
    saving, num_parameters = run.recipe.checkpoint, run.task.student_skeleton().num_trained_parameters()
    is_periodic = saving.every_steps is not None or saving.every_minutes is not None
    count = saving.keep + 1 if is_periodic else int(saving.at_end)
    # Float32 weights and AdamW's two moments.
    return num_parameters * WEIGHTS * (3 * count + 1)


def _remedy(run: _Run, spec: PlacementSpec[Any]) -> str:
    """The first single change of the recipe with which the placement fits; what costs the least time comes first."""
    for overrides, text in _changes(run):
        try:
            changed = _open(_with(run.recipe, overrides), run.task, run.launch, run.machine)
        except UserError:
            continue
        if _why_not(changed, spec):
            continue
        options = spec.options.of(changed.options(spec.name))
        needs = Footprint(0, 0) if spec.memory is None else spec.memory(changed.sizes, options, changed.world)
        host_bytes = needs.host + changed.state.host * changed.world.num_local_ranks
        if not _shortage(changed, _gpu_bytes(changed, spec, options, needs), host_bytes):
            return text
    return ""


def _changes(run: _Run) -> list[tuple[dict[str, Mapping[str, Any]], str]]:
    """(section -> values, the same as overrides in words)."""
    recipe, found = run.recipe, []
    if not recipe.train.gradient_checkpointing:
        found.append(({"train": {"gradient_checkpointing": True}}, "train.gradient_checkpointing=true"))
    if recipe.teacher.quantization == "none":
        found.append(({"teacher": {"quantization": "int8"}}, "teacher.quantization=int8"))
    size, total = recipe.train.batch_size, recipe.train.batch_size * run.layout.accumulation_steps
    smaller = next((size // factor for factor in range(2, size + 1) if size % factor == 0), None)
    if smaller is not None:
        samples = total * run.layout.num_processes
        values = {"batch_size": smaller, "gradient_accumulation_steps": None, "samples_per_update": samples}
        found.append(({"train": values}, f"train.batch_size={smaller} train.samples_per_update={samples}"))
    return found


def _with(recipe: Recipe, sections: Mapping[str, Mapping[str, Any]]) -> Recipe:
    changed = {name: getattr(recipe, name).model_copy(update=dict(values)) for name, values in sections.items()}
    return recipe.model_copy(update=changed)
