"""From a recipe to a `Run`, in dependency order, in one place."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, final

from accelerate.tracking import get_available_trackers
from torch.utils.data import DataLoader, Dataset

from distiller.cache.layout import Layout
from distiller.cache.opening import check_same_cache, open_run_cache
from distiller.cache.reading import CachedCollation, CachedData
from distiller.checkpoint.format import Identity
from distiller.checkpoint.resuming import compilation_notices, verify
from distiller.config.quantization import ARITHMETIC
from distiller.config.recipe import Recipe
from distiller.data.loader_processes import choose_num_workers, open_loader
from distiller.data.loading import check_loader_sockets
from distiller.data.order import RankSampler, SampleKey
from distiller.distributed.devices import quiet_libraries
from distiller.distributed.process import world_size
from distiller.errors import UserError
from distiller.launch.accelerator import resolve_accumulation
from distiller.launch.deepspeed import is_deepspeed_launch
from distiller.run_folder.output_dir import (
    Claim,
    check_output_dir,
    check_shared,
    claim_output_dir,
    is_finished_by_files,
)
from distiller.run_overview import expectation_of, print_overview
from distiller.session import (
    Session,
    check_same_data,
    check_stages_shared,
    join_world,
    load_teacher_and_data,
    measure_quantization,
    prepare_stages,
    print_missing_durability,
    print_notices,
)
from distiller.student_preparation import Student, prepare_student
from distiller.tasks import open_task
from distiller.tasks.base import Task
from distiller.tasks.interfaces import Cacheable, HoldsOut, Samplable, default_recipe, notices_of
from distiller.tasks.micro_batch import LiveCollation, MicroBatch, RepeatedDraws
from distiller.teacher_preparation import place_teacher
from distiller.teachers.base import Setup, Teacher
from distiller.teachers.factory import resolve_placement
from distiller.teachers.quantization.error import QuantizationError
from distiller.teachers.rules import check_placement, placement_notices
from distiller.training.memory_advice import PlannedMemory
from distiller.training.run import Run
from distiller.training.tracking import Tracker
from distiller.training.update_plan import last_step_of, length_notices, plan_updates


@final
@dataclass(frozen=True)
class Finished:
    """The output folder already holds the whole run."""

    steps: int


@final
@dataclass(frozen=True)
class Stages:
    """What the stages before the loop leave: the teacher, if the loop asks one, and the loader's data.

    Attributes:
        placement: the teacher's; the recipe's where no teacher was loaded.
        collation: the loader's `collate_fn`.
        quantization_error: of a quantised teacher's outputs.
        took_s: seconds, loading the teacher included.
    """

    teacher: Teacher | None
    placement: str
    data: Dataset[Any]
    collation: Callable[..., MicroBatch]
    quantization_error: QuantizationError | None
    took_s: float


def build(
    recipe: Recipe, resume: bool = False, planned_updates: int | None = None, excluded: tuple[str, ...] = ()
) -> Run | Finished:
    """Builds a run. Communicates; raises UserError before any weight is read.

    Every check that needs no weights comes before the first weight is read, and all ranks raise together.
    `planned_updates`: of the run for which this shorter one stands, and as which it is compiled; `excluded`: placements
    that `auto` does not choose.
    """
    began = time.perf_counter()
    try:
        task = check_run(recipe, world_size(), is_deepspeed_launch())
    except UserError:
        # The teacher or the data of a finished run may be gone; nothing of them is needed any more.
        if resume and is_finished_by_files(recipe):
            return Finished(recipe.train.max_steps or 0)
        raise
    session = join_world(default_recipe(task, recipe), task, planned_updates)
    setup, head_bytes = place_teacher(session, excluded)
    check_same_data(task, session.ranks)
    claim, cached, identity = _claim_folder(session, setup, resume)
    if claim.is_finished:
        session.accelerator.end_training()
        return Finished(session.last_step)
    stages = _run_stages(session, setup, cached)
    student = prepare_student(session, identity, claim.steps_done)
    loader = _open_loader(session, stages, claim.steps_done)
    memory = PlannedMemory(setup.reserved_bytes - head_bytes, setup.gpu_bytes)
    expectation = expectation_of(setup, stages.placement)
    compiles_blocks = {session.student_compile_mode, setup.compile_mode} != {"none"}
    run = _assemble(session, stages, student, loader, claim.steps_done, began, head_bytes, memory)
    return replace(run, expectation=expectation, compiles_blocks=compiles_blocks)


def build_task(recipe: Recipe) -> Task[Any, Any]:
    """The recipe's task, checked against the files that it names; reads no weights. Raises UserError."""
    task = open_task(recipe)
    quiet_libraries()
    return task


def check_run(recipe: Recipe, num_processes: int, under_deepspeed: bool) -> Task[Any, Any]:
    """The task of a training run, checked without a process group; reads no weights. Raises UserError."""
    check_placement(recipe.teacher, num_processes, under_deepspeed)
    check_loader_sockets(recipe.train.num_workers)
    task = build_task(recipe)
    if recipe.cache.draws is not None and recipe.cache.draws > 1 and not task.has_draws:
        raise UserError(
            f"cache.draws is {recipe.cache.draws} and this task asks the teacher the same in every epoch; leave it out"
        )
    if recipe.teacher.prefetch_steps and not task.needs_live_teacher:
        raise UserError(
            f"teacher.prefetch_steps is {recipe.teacher.prefetch_steps} and this run asks no teacher while it trains; "
            "set it to 0"
        )
    check_evaluation(recipe, task)
    plan = plan_updates(recipe, task.num_samples, resolve_accumulation(recipe, num_processes), num_processes)
    steps, last_step = recipe.profile.steps, last_step_of(recipe, plan)
    if steps is not None and steps[1] > last_step:
        raise UserError(f"profile.steps is {list(steps)} and the run has {last_step} updates; profile earlier ones")
    available = [str(tracker) for tracker in get_available_trackers()]
    for tracker in recipe.tracking.trackers:
        if tracker not in available:
            raise UserError(f"tracking.trackers names {tracker}, which is not installed; pip install {tracker}")
    return task


def check_evaluation(recipe: Recipe, task: Task[Any, Any]) -> None:
    """Raises UserError where the recipe asks for an evaluation while training that the task or its data lack."""
    settings = recipe.evaluation
    if settings.sample_every_steps is not None and not isinstance(task, Samplable):
        raise UserError(f"evaluation.sample_every_steps: task.kind {recipe.task.kind} shows no samples; leave it out")
    if settings.every_steps is None:
        return
    if not isinstance(task, HoldsOut):
        raise UserError(f"evaluation.every_steps: task.kind {recipe.task.kind} holds no data out; leave it out")
    if not task.num_held_out:
        raise UserError(
            f"evaluation.every_steps is {settings.every_steps} and data.held_out {recipe.data.held_out:g} holds "
            "nothing out of the data; set it to 0.05, or give more data"
        )
    if task.needs_live_teacher and recipe.teacher.placement == "cached":
        raise UserError(
            f"evaluation.every_steps is {settings.every_steps}, which asks the teacher about held-out data, and "
            "teacher.placement is cached, where only answers about the training data are; leave it out, and use "
            "`distiller evaluate` afterwards"
        )


def _claim_folder(
    session: Session[Any], setup: Setup, resume: bool
) -> tuple[Claim, tuple[Layout, int] | None, Identity]:
    """Makes the output folder this run's and says what it is: the last checks before weights are read. Communicates.

    Returns:
        the claim, the layout and draws of the run's cache (None without one), and what checkpoints are compared by.
    """
    recipe, task, ranks, world = session.recipe, session.task, session.ranks, session.world
    plan, dtype, last_step = session.plan, session.teacher_dtype, session.last_step
    asks_teacher = task.needs_live_teacher and recipe.teacher.placement != "cached"
    identity = Identity(
        engine=world.engine,
        world_size=world.accelerator.num_processes,
        samples_per_update=plan.samples_per_update,
        num_samples=task.num_samples,
        data_digest=task.data_digest,
        mixed_precision=world.mixed_precision,
        teacher_dtype=str(dtype).removeprefix("torch."),
        student_compile=session.student_compile_mode,
        teacher_compile=setup.compile_mode if asks_teacher else "none",
        quantization=ARITHMETIC[recipe.teacher.quantization],
    )
    finished = ranks.broadcast_from_main(lambda: check_output_dir(recipe, resume, last_step))
    # What they cannot read is refused before the folder is this run's.
    of_task = [] if finished else ranks.all_succeed(lambda: notices_of(task))
    of_placement = placement_notices(recipe.teacher, task.needs_live_teacher)
    of_length = length_notices(recipe, last_step)
    notices = [] if finished else [*world.notices, *of_placement, *of_length, *of_task]
    cached = None
    if recipe.teacher.placement == "cached" and not finished:
        cached = ranks.broadcast_from_main(lambda: open_run_cache(recipe, task, dtype, session.num_epochs))
        check_same_cache(Path(recipe.teacher.cache or ""), ranks)
    claim = ranks.broadcast_from_main(lambda: claim_output_dir(recipe, identity, resume, last_step))
    if claim.is_finished:
        return claim, cached, identity
    folder = Path(recipe.output_dir)
    if resume and ranks.is_main:
        print(claim.resume_message(folder, last_step), file=sys.stderr, flush=True)
    check_shared(folder, ranks)
    check_stages_shared(session)
    print_missing_durability(session, folder)
    if claim.steps_done:
        verify(folder, claim.steps_done, ranks)
    print_notices(session, notices)
    if claim.resumed is not None:
        print_notices(session, compilation_notices(claim.resumed, identity))
    print_overview(session, setup, claim.steps_done)
    return claim, cached, identity


def _run_stages(session: Session[Any], setup: Setup, cached: tuple[Layout, int] | None) -> Stages:
    """Runs the stages, loads the teacher where they or the loop ask it, and opens the data. Communicates."""
    recipe, task, started = session.recipe, session.task, time.perf_counter()
    stages_need_teacher, placement = prepare_stages(session), recipe.teacher.placement
    is_asked = stages_need_teacher or task.needs_live_teacher
    if is_asked:
        if not task.needs_live_teacher:
            setup = resolve_placement(task.network, setup)
        placement = setup.options.placement
    teacher, data = load_teacher_and_data(session, setup if is_asked else None)
    collation: Callable[..., MicroBatch] = LiveCollation(task)
    if cached is not None:
        assert isinstance(task, Cacheable), "open_run_cache refuses others"
        data, collation = CachedData(data, Path(recipe.teacher.cache or ""), *cached), CachedCollation(task)
    elif recipe.cache.draws is not None and task.has_draws:
        data = RepeatedDraws(data, recipe.cache.draws)
    took_s, quantization_error = time.perf_counter() - started, None
    if teacher is not None and recipe.teacher.placement != "cached":
        quantization_error = measure_quantization(session, setup, teacher, data)
    if teacher is not None and not task.needs_live_teacher:
        teacher.close()
        teacher = None
    return Stages(teacher, placement, data, collation, quantization_error, took_s)


def _open_loader(session: Session[Any], stages: Stages, steps_done: int) -> DataLoader[Any]:
    """This rank's micro-batches, from the first update that is left to the last. Communicates."""
    plan, ranks = session.plan, session.ranks
    sampler = RankSampler(plan, ranks.rank, steps_done, session.last_step)
    # Of a run whose loop had ended there are none.
    first_keys = list(islice(sampler, 2))

    def read(keys: Sequence[SampleKey]) -> MicroBatch:
        return stages.collation([stages.data[key] for key in keys])

    num_workers = choose_num_workers(
        session.recipe.train.num_workers,
        [partial(read, keys) for keys in first_keys],
        ranks,
        micro_batches=plan.accumulation_steps,
        is_cpu_busy=stages.placement == "cpu",
    )
    return open_loader(stages.data, sampler, stages.collation, num_workers, plan.accumulation_steps, ranks)


def _assemble(
    session: Session[Any],
    stages: Stages,
    student: Student,
    loader: DataLoader[Any],
    steps_done: int,
    began: float,
    head_bytes: int,
    memory: PlannedMemory,
) -> Run:
    """Opens the tracker and puts a run together. Communicates."""
    recipe, accelerator, first_step = session.recipe, session.accelerator, steps_done + 1
    return Run(
        recipe=recipe,
        accelerator=accelerator,
        engine=session.world.engine,
        mixed_precision=session.world.mixed_precision,
        plan=session.plan,
        task=session.task,
        teacher=stages.teacher,
        placement=stages.placement,
        student=student.module,
        student_dtype=next(student.module.parameters()).dtype,
        student_parameters=student.num_parameters,
        optimizer=student.optimizer,
        average=student.average,
        loader=loader,
        checkpoints=student.checkpoints,
        tracker=session.ranks.all_succeed(lambda: Tracker(recipe, accelerator, first_step, session.last_step)),
        first_step=first_step,
        last_step=session.last_step,
        ranks=session.ranks,
        skipped_steps=student.skipped_steps,
        stages_s=stages.took_s,
        started=began,
        quantization_error=stages.quantization_error,
        replicated_head_bytes=head_bytes,
        planned_memory=memory,
    )
