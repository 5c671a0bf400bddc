"""`distiller cache`: builds what a training run builds of data and teacher, and writes the outputs down."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch.utils.data import Dataset

from distiller import __version__
from distiller.build import check_run, check_same_data, epochs_of, last_step_of, plan_updates
from distiller.cache.key import content_key
from distiller.cache.layout import Layout, evenly, shard_name
from distiller.cache.manifest import MANIFEST_FILE, Manifest, open_cache, remove_damaged
from distiller.cache.shards import remove_partial
from distiller.cache.writing import Batching, CacheWriter, Measured, check_room, claim, plan_layout
from distiller.config.recipe import Recipe
from distiller.data.rng import sample_order
from distiller.distributed.devices import teacher_dtype
from distiller.distributed.process import world_size
from distiller.distributed.ranks import Ranks
from distiller.errors import RunError, UserError
from distiller.launch.accelerator import World, open_world
from distiller.launch.deepspeed import is_deepspeed_launch
from distiller.launch.fsdp import wrapped_classes
from distiller.run_folder.output_dir import check_shared, check_shared_stages
from distiller.storage.durable_writes import missing_durability
from distiller.storage.folder_lock import lock_folder
from distiller.storage.stage_folders import CACHED_STAGES
from distiller.tasks.interfaces import Cacheable, Staged, format_notice, missing_stage, notices_of
from distiller.teachers import PLACEMENTS
from distiller.teachers.base import Setup, Teacher
from distiller.teachers.factory import resolve_placement

COMPARED = 8192
"""Counted tokens, over which forms are compared."""


def make_cache(recipe: Recipe, repair: bool = False, compare: bool = False) -> None:
    """Writes, completes or repairs the cache in `teacher.cache`; or compares what could be stored, and writes nothing.

    Communicates.

    Raises UserError before any weight is read, but for a disk that turns out too small for what the first outputs take.
    """
    recipe, was_cached = _with_live_teacher(recipe)
    task = check_run(recipe, world_size(), is_deepspeed_launch())
    if not task.needs_live_teacher:
        raise UserError("distiller cache: this recipe's loss asks no live teacher, so there is nothing to keep of one")
    if not isinstance(task, Cacheable):
        raise UserError(f"distiller cache: the teacher's outputs of task.kind {recipe.task.kind} cannot be stored")
    world = open_world(recipe, lambda fsdp: wrapped_classes(fsdp, task.student_skeleton(), task.block_classes))
    accelerator, folder = world.accelerator, Path(recipe.teacher.cache or "")
    if compare and task.cached_form()["kind"] == "whole":
        accelerator.print("cache: this task's outputs are stored whole, which is exact; there is nothing to compare")
        accelerator.end_training()
        return
    ranks, dtype = Ranks.join(accelerator.device), teacher_dtype(recipe.teacher.dtype, accelerator.device)
    plan = plan_updates(recipe, task.num_samples, world.accumulation_steps, ranks.world_size)
    last_step = last_step_of(recipe, plan)
    draws = (recipe.cache.draws or epochs_of(plan, last_step)) if task.has_draws else 1
    for notice in (*world.notices, *notices_of(task)):
        accelerator.print(format_notice(notice))
    if was_cached:
        accelerator.print("note: teacher.placement=cached is for training; here the teacher's place is chosen (auto)")
    setup = resolve_placement(task.network, Setup(dtype, recipe.teacher, ranks, world.engine.startswith("deepspeed")))
    check_same_data(task, ranks)
    is_missing = ranks.all_succeed(lambda: missing_stage(task, dtype) is not None)
    check_shared_stages(recipe, is_missing, ranks)

    started = time.perf_counter()
    # Before the key: a teacher that is trained first has no weights until then.
    if isinstance(task, Staged):
        task.prepare_stages(ranks, dtype)
    key: dict[str, Any] = {}
    if not compare:
        key = ranks.broadcast_from_main(lambda: _claimed_key(folder, recipe, task, dtype))
        check_shared(folder, ranks, "teacher.cache")
        if (missing := ranks.broadcast_from_main(lambda: missing_durability(folder))) is not None:
            accelerator.print(f"note: {missing}")
        if not repair and ranks.broadcast_from_main(lambda: _is_complete(folder, key, task, draws)):
            ranks.broadcast_from_main(lambda: _keep_stages(folder, task, dtype))
            accelerator.print(f"{folder} is complete already; nothing to do (--repair reads all of it, and mends it)")
            accelerator.end_training()
            return
    teacher = PLACEMENTS[setup.options.placement](task.network, setup)
    ranks.barrier()
    data = task.load_data(ranks, teacher)
    if compare:
        _compare(task, teacher, data, recipe, ranks)
        teacher.close()
        accelerator.end_training()
        return
    batching = Batching(recipe.train.batch_size, world.accumulation_steps, recipe.train.num_workers)
    filling = CacheWriter(folder, task, teacher, data, batching, ranks)
    measured = filling.measure()
    files = draws * measured.bytes_per_sample * task.num_samples / (recipe.cache.shard_mib * 2**20)
    per_shard = evenly(task.num_samples, draws, max(math.ceil(files), ranks.world_size), batching.samples)
    wanted = Layout(task.num_samples, draws, per_shard, recipe.seed)
    layout = ranks.broadcast_from_main(lambda: plan_layout(folder, key, wanted, measured.names))
    if repair:
        mine = range(ranks.rank, layout.num_shards, ranks.world_size)
        for names in ranks.gather(ranks.all_succeed(lambda: remove_damaged(folder, layout, mine, measured.names))):
            for name in names:
                accelerator.print(f"cache: {name} is damaged; it will be made again")
    missing = filling.missing(layout)
    accelerator.print(_described(task, layout, measured, len(missing)))
    still = sum(layout.size_of(shard) for shard in missing) * measured.bytes_per_sample
    ranks.broadcast_from_main(lambda: check_room(folder, still))
    ranks.broadcast_from_main(lambda: _keep_stages(folder, task, dtype))
    filling.fill(layout, missing)
    if ranks.is_main:
        seconds = time.perf_counter() - started
        _finish(folder, key, task, layout, measured, recipe, world, setup.options.placement, seconds)
    teacher.close()
    ranks.barrier()
    accelerator.end_training()


def _compare(task: Cacheable[Any, Any], teacher: Teacher, data: Dataset[Any], recipe: Recipe, ranks: Ranks) -> None:
    """Asks for the first rows of the first epoch, on every rank alike, and prints rank 0's figures."""
    order, size = sample_order(recipe.seed, 0, task.num_samples), recipe.train.batch_size
    batches, num_counted = [], 0
    while num_counted < COMPARED and len(batches) * size < len(order):
        keys = order[len(batches) * size : (len(batches) + 1) * size]
        batches.append(task.collate([data[0, sample_id] for sample_id in keys]))
        num_counted += task.count(batches[-1])
    batches = [task.to_device(batch, ranks.device) for batch in batches]
    outputs = [teacher.predict([task.request(batch)])[0] for batch in batches]
    if ranks.is_main:
        figures = task.compare_forms(batches, outputs)
        print(f"over {num_counted:,} counted tokens of the recipe's own data, beside the live teacher:\n{figures}")
    ranks.barrier()


def _with_live_teacher(recipe: Recipe) -> tuple[Recipe, bool]:
    """The recipe as the command can run it, and whether it says `cached`, which is for training."""
    if recipe.teacher.placement != "cached":
        return recipe, False
    return recipe.model_copy(update={"teacher": recipe.teacher.model_copy(update={"placement": "auto"})}), True


def _claimed_key(folder: Path, recipe: Recipe, task: Cacheable[Any, Any], dtype: torch.dtype) -> dict[str, Any]:
    key = content_key(recipe, task, dtype)
    claim(folder, key)
    try:
        lock_folder(folder, "teacher.cache")
    except OSError as error:
        raise UserError(f"teacher.cache: {folder} cannot be written ({error.strerror}); give another folder") from error
    remove_partial(folder)
    return key


def _is_complete(folder: Path, key: Mapping[str, Any], task: Cacheable[Any, Any], draws: int) -> bool:
    """Whether the cache is whole and has what this recipe asks of it; UserError where it is whole and has not."""
    if not (folder / MANIFEST_FILE).is_file():
        return False
    open_cache(folder, key, task.wanted, draws, draws)
    return True


def _keep_stages(folder: Path, task: Cacheable[Any, Any], dtype: torch.dtype) -> None:
    """Puts what the outputs belong to beside them, so that the folder can be moved and read from any output_dir."""
    for stage in task.kept_stages(dtype) if isinstance(task, Staged) else ():
        try:
            if stage.is_complete:
                stage.copy_into(folder / CACHED_STAGES)
        except OSError as error:
            raise RunError(f"teacher.cache: {stage.folder} cannot be copied into {folder} ({error})") from error


def _described(task: Cacheable[Any, Any], layout: Layout, measured: Measured, num_missing: int) -> str:
    of_draws = f" x {layout.draws} draws" if task.has_draws else ""
    mib = layout.num_items * measured.bytes_per_sample / 2**20
    return (
        f"cache: {layout.num_samples} samples{of_draws}, {measured.bytes_per_sample:,.0f} bytes a sample "
        f"({measured.bytes_per_token:,.1f} a token), about {mib:,.1f} MiB in all; "
        f"{num_missing} of {layout.num_shards} files to write"
    )


def _finish(
    folder: Path,
    key: Mapping[str, Any],
    task: Cacheable[Any, Any],
    layout: Layout,
    measured: Measured,
    recipe: Recipe,
    world: World,
    placement: str,
    seconds: float,
) -> None:
    sizes = tuple((folder / shard_name(shard)).stat().st_size for shard in range(layout.num_shards))
    per_token = sum(sizes) / layout.num_items * measured.bytes_per_token / measured.bytes_per_sample
    made_with = {
        "distiller": __version__,
        "torch": torch.__version__,
        **{name: version(name) for name in ("transformers", "diffusers") if name in sys.modules},
        "accelerate": accelerate.__version__,
        "device": world.accelerator.device.type,
        "placement": placement,
        "world_size": world.accelerator.num_processes,
        "batch_size": recipe.train.batch_size,
        "seconds": round(seconds, 1),
    }
    manifest = Manifest(key, layout, task.wanted, sizes, measured.bytes_per_sample, measured.bytes_per_token, made_with)
    manifest.write(folder)
    print(
        f"cache: {sum(sizes) / 2**20:,.1f} MiB in {layout.num_shards} files ({per_token:,.1f} bytes a token on the "
        f"disk), {seconds:.1f} s, complete in {folder}"
    )
