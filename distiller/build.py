"""From a recipe to a `Run`, in dependency order, in one place."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from torch.utils.data import DataLoader, Dataset

from distiller.cache.key import content_key
from distiller.cache.layout import Layout
from distiller.cache.manifest import MANIFEST_FILE, open_cache
from distiller.cache.reading import CachedCollation, CachedData
from distiller.checkpoint.format import Identity
from distiller.checkpoint.resuming import verify
from distiller.checkpoint.saving import Checkpoints
from distiller.config.recipe import Recipe
from distiller.data.loading import check_loader_sockets
from distiller.data.order import RankSampler, UpdatePlan
from distiller.distributed.devices import quiet_libraries, teacher_dtype
from distiller.distributed.process import initialize_loader_worker, world_size
from distiller.distributed.ranks import Ranks
from distiller.errors import AgreedUserError, UserError
from distiller.launch.accelerator import open_world, resolve_accumulation
from distiller.launch.checks import check_nvme_room
from distiller.launch.deepspeed import deepspeed_config, is_deepspeed_launch
from distiller.launch.fsdp import wrapped_classes
from distiller.run_folder.inputs import record_inputs
from distiller.run_folder.output_dir import (
    check_output_dir,
    check_shared,
    check_shared_stages,
    claim_output_dir,
    is_finished_by_files,
)
from distiller.storage.durable_writes import missing_durability
from distiller.student_state.factory import open_state
from distiller.student_state.moving_average import MovingAverage
from distiller.tasks import open_task
from distiller.tasks.base import Task
from distiller.tasks.interfaces import (
    Cacheable,
    ReplicatesHead,
    Staged,
    default_recipe,
    format_notice,
    missing_stage,
    notices_of,
)
from distiller.tasks.micro_batch import LiveCollation, MicroBatch, RepeatedDraws
from distiller.teachers import PLACEMENTS
from distiller.teachers.base import Setup
from distiller.teachers.factory import resolve_placement
from distiller.teachers.quantization_error import measure_error
from distiller.teachers.rules import check_placement
from distiller.training.loop import Run
from distiller.training.optim import build_optimizer
from distiller.training.student_memory import gpu_bytes, host_bytes
from distiller.training.tracking import Tracker


@dataclass(frozen=True)
class Finished:
    """The output folder already holds the whole run."""

    steps: int


def last_step_of(recipe: Recipe, plan: UpdatePlan) -> int:
    """The number of the run's last update; the first is 1."""
    return recipe.train.max_steps or (recipe.train.num_epochs or 1) * plan.updates_per_epoch


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
    plan_updates(recipe, task.num_samples, resolve_accumulation(recipe, num_processes), num_processes)
    available = [str(tracker) for tracker in get_available_trackers()]
    for tracker in recipe.tracking.trackers:
        if tracker not in available:
            raise UserError(f"tracking.trackers names {tracker}, which is not installed; pip install {tracker}")
    return task


def build(recipe: Recipe, resume: bool = False) -> Run | Finished:
    """Builds a run. Communicates; raises UserError before any weight is read."""
    began = time.perf_counter()
    try:
        task = check_run(recipe, world_size(), is_deepspeed_launch())
    except UserError:
        # The teacher or the data of a finished run may be gone; nothing of them is needed any more.
        if resume and is_finished_by_files(recipe):
            return Finished(recipe.train.max_steps or 0)
        raise
    recipe = default_recipe(task, recipe)
    world = open_world(recipe, lambda fsdp: wrapped_classes(fsdp, task.student_skeleton(), task.block_classes))
    accelerator = world.accelerator
    plan = plan_updates(recipe, task.num_samples, world.accumulation_steps, accelerator.num_processes)
    last_step = last_step_of(recipe, plan)
    dtype = teacher_dtype(recipe.teacher.dtype, accelerator.device)
    under_deepspeed = world.engine.startswith("deepspeed")
    size = task.student_skeleton().num_trained_parameters()
    ranks = Ranks.join(accelerator.device)
    if world.offload.is_on("nvme"):
        zero = deepspeed_config(accelerator)["zero_optimization"]
        local_share = ranks.local_world_size / ranks.world_size
        ranks.all_succeed(lambda: check_nvme_room(zero, size, local_share))
    beside = task.replicated_head_bytes(dtype) if isinstance(task, ReplicatesHead) else 0
    reserved = gpu_bytes(size, recipe, world) + beside, host_bytes(size, recipe, world)
    setup = Setup(dtype, recipe.teacher, ranks, under_deepspeed, *reserved)
    is_cached = recipe.teacher.placement == "cached"
    if task.needs_live_teacher and not is_cached:
        setup = resolve_placement(task.network, setup)
    check_same_data(task, ranks)
    identity = Identity(
        engine=world.engine,
        world_size=accelerator.num_processes,
        samples_per_update=plan.samples_per_update,
        num_samples=task.num_samples,
        data_digest=task.data_digest,
        mixed_precision=world.mixed_precision,
        teacher_dtype=str(dtype).removeprefix("torch."),
    )
    finished = ranks.broadcast_from_main(lambda: check_output_dir(recipe, resume, last_step))
    # What they cannot read is refused before the folder is this run's.
    notices = () if finished else (*world.notices, *ranks.all_succeed(lambda: notices_of(task)))
    cached = None
    if is_cached and not finished:
        cached = ranks.broadcast_from_main(lambda: open_run_cache(recipe, task, dtype, plan, last_step))
        check_same_cache(Path(recipe.teacher.cache or ""), ranks)
    claim = setup.ranks.broadcast_from_main(lambda: claim_output_dir(recipe, identity, resume, last_step))
    if claim.is_finished:
        accelerator.end_training()
        return Finished(last_step)
    run_dir, done = Path(recipe.output_dir), claim.steps_done
    if resume and ranks.is_main:
        print(claim.resume_message(run_dir, last_step), file=sys.stderr, flush=True)
    check_shared(run_dir, ranks)
    is_missing = ranks.all_succeed(lambda: missing_stage(task, dtype) is not None)
    check_shared_stages(recipe, is_missing, ranks)
    if (missing := ranks.broadcast_from_main(lambda: missing_durability(run_dir))) is not None:
        accelerator.print(f"note: {missing}")
    if done:
        verify(run_dir, done, ranks)
    _announce(notices, plan, task, world.engine, accelerator)

    started = time.perf_counter()
    stages_need_teacher = isinstance(task, Staged) and task.prepare_stages(ranks, dtype)
    teacher, placement = None, recipe.teacher.placement
    if stages_need_teacher or task.needs_live_teacher:
        if not task.needs_live_teacher:
            setup = resolve_placement(task.network, setup)
        teacher, placement = PLACEMENTS[setup.options.placement](task.network, setup), setup.options.placement
    # Ranks load at different speeds, and the collectives from here on have short time-outs: they meet first.
    setup.ranks.barrier()
    data: Dataset[Any] = task.load_data(ranks, teacher)
    collation: Callable[..., MicroBatch] = LiveCollation(task)
    if cached is not None:
        assert isinstance(task, Cacheable), "open_run_cache refuses others"
        data, collation = CachedData(data, Path(recipe.teacher.cache or ""), *cached), CachedCollation(task)
    elif recipe.cache.draws is not None and task.has_draws:
        data = RepeatedDraws(data, recipe.cache.draws)
    stages_s = time.perf_counter() - started
    quantization_error = None
    if teacher is not None and setup.options.quantization != "none" and not is_cached:
        requests = (task.request(task.collate([data[0, sample_id]])) for sample_id in range(task.num_samples))
        quantization_error = measure_error(task.network, setup, teacher, requests)
    if teacher is not None and not task.needs_live_teacher:
        teacher.close()
        teacher = None

    trained = task.build_student()
    student_parameters = trained.num_model_parameters()
    # Not before: a hub's weights are there by now.
    ranks.broadcast_from_main(lambda: record_inputs(recipe, run_dir))
    if recipe.train.gradient_checkpointing or (world.fsdp is not None and world.fsdp.recomputes):
        task.enable_gradient_checkpointing(trained)
    setup.ranks.barrier()
    student, optimizer = accelerator.prepare(trained, build_optimizer(trained, recipe.optim))
    student_dtype = next(student.parameters()).dtype
    decay = recipe.train.ema_decay
    state = open_state(world.engine, accelerator, student, optimizer)
    average = None if decay is None else MovingAverage(state, decay)
    checkpoints = Checkpoints(run_dir, ranks, recipe.checkpoint.keep, identity, state, average)
    ranks.broadcast_from_main(checkpoints.remove_stale)
    skipped_steps = checkpoints.load(done) if done else 0
    if recipe.checkpoint.every_steps or recipe.checkpoint.every_minutes:
        checkpoints.reserve()
    loader = DataLoader(
        data,
        batch_sampler=RankSampler(plan, accelerator.process_index, done, last_step),
        collate_fn=collation,
        num_workers=recipe.train.num_workers,
        pin_memory=accelerator.device.type == "cuda",
        persistent_workers=False,
        worker_init_fn=initialize_loader_worker,
        prefetch_factor=2 if recipe.train.num_workers else None,
    )
    tracker = ranks.all_succeed(lambda: Tracker(recipe, accelerator, done + 1, last_step))
    return Run(
        recipe=recipe,
        accelerator=accelerator,
        engine=world.engine,
        mixed_precision=world.mixed_precision,
        plan=plan,
        task=task,
        teacher=teacher,
        placement=placement,
        student=student,
        student_dtype=student_dtype,
        student_parameters=student_parameters,
        optimizer=optimizer,
        average=average,
        loader=loader,
        checkpoints=checkpoints,
        tracker=tracker,
        first_step=done + 1,
        last_step=last_step,
        ranks=ranks,
        skipped_steps=skipped_steps,
        stages_s=stages_s,
        started=began,
        quantization_error=quantization_error,
        replicated_head_bytes=beside,
    )


def open_run_cache(
    recipe: Recipe, task: Task[Any, Any], dtype: torch.dtype, plan: UpdatePlan, last_step: int
) -> tuple[Layout, int]:
    """The layout of the run's cache, and after how many epochs its draws repeat. Raises UserError."""
    if not task.needs_live_teacher:
        raise UserError("teacher.placement=cached: this recipe's loss asks no teacher; leave teacher.placement out")
    if not isinstance(task, Cacheable):
        raise UserError(
            f"teacher.placement=cached: the teacher's outputs of task.kind {recipe.task.kind} cannot be stored; leave "
            "teacher.placement out"
        )
    epochs = epochs_of(plan, last_step) if task.has_draws else 1
    folder = Path(recipe.teacher.cache or "")
    key = content_key(recipe, task, dtype)
    manifest = open_cache(folder, key, task.wanted, epochs, recipe.cache.draws if task.has_draws else 1)
    if (missing := missing_stage(task, dtype)) is not None:
        raise UserError(
            f"teacher.placement=cached: {missing} is not there, to which the cached outputs belong, and the cache "
            "holds no copy; run `distiller cache` again with the cache_dir (or output_dir) that it was run with"
        )
    return manifest.layout, (recipe.cache.draws or epochs) if task.has_draws else 1


def check_same_cache(folder: Path, ranks: Ranks) -> None:
    """Every machine sees the same cache, or UserError on all ranks: a copy may be an older one. Communicates."""

    def look() -> str | None:
        try:
            return hashlib.blake2b((folder / MANIFEST_FILE).read_bytes()).hexdigest() if ranks.is_local_main else None
        except OSError as error:
            return f"{error.strerror}"

    seen = ranks.gather(look())
    other = [rank for rank, digest in enumerate(seen) if digest not in (None, seen[0])]
    if other:
        raise AgreedUserError(
            f"teacher.cache: {folder} of rank {other[0]} is not that of rank 0; copy it whole to every machine, or "
            "give a folder that all of them share"
        )


def check_same_data(task: Task[Any, Any], ranks: Ranks) -> None:
    """Every rank reads the same data, or UserError on all of them. Communicates."""
    seen = ranks.gather((task.num_samples, task.data_digest))
    other = [rank for rank, found in enumerate(seen) if found != seen[0]]
    if other:
        raise AgreedUserError(
            f"data: rank {other[0]} reads {seen[other[0]][0]} samples and rank 0 {seen[0][0]}, or others than it; give "
            "every machine the same files"
        )


def epochs_of(plan: UpdatePlan, last_step: int) -> int:
    """How many passes over the data a run begins."""
    return plan.epoch_of(last_step - 1) + 1


def plan_updates(recipe: Recipe, num_samples: int, accumulation_steps: int, num_processes: int) -> UpdatePlan:
    """How samples are split over updates and ranks; UserError when one update is larger than the data."""
    plan = UpdatePlan(num_samples, recipe.train.batch_size, accumulation_steps, num_processes, recipe.seed)
    if not plan.updates_per_epoch:
        raise UserError(
            f"one update takes {plan.samples_per_update} samples (train.batch_size {plan.batch_size} x accumulation "
            f"{plan.accumulation_steps} x {plan.world_size} processes) and the data has {num_samples}; "
            f"{_smaller_update(plan)}"
        )
    return plan


def _smaller_update(plan: UpdatePlan) -> str:
    """What makes an update no larger than the data."""
    if not plan.num_samples:
        return "give some data"
    if fitting := plan.num_samples // (plan.accumulation_steps * plan.world_size):
        return f"lower batch_size to {fitting} or less"
    if fitting := plan.num_samples // plan.world_size:
        return (
            "lower train.gradient_accumulation_steps (or samples_per_update), with batch_size 1 to accumulation "
            f"{fitting} or less"
        )
    return f"start at most {plan.num_samples} {'process' if plan.num_samples == 1 else 'processes'}, or give more data"


def _announce(
    notices: Sequence[str], plan: UpdatePlan, task: Task[Any, Any], engine: str, accelerator: Accelerator
) -> None:
    for notice in notices:
        accelerator.print(format_notice(notice))
    accelerator.print(
        f"{engine} on {accelerator.num_processes} x {accelerator.device.type}: {plan.samples_per_update} samples an "
        f"update (batch {plan.batch_size} x accumulation {plan.accumulation_steps} x {plan.world_size} processes), "
        f"{plan.num_samples} samples an epoch"
        + (f", of which the last {plan.dropped_per_epoch} in its order are dropped" if plan.dropped_per_epoch else "")
    )
