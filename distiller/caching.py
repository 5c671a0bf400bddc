"""`distiller cache`: builds what a training run builds of data and teacher, and writes the outputs down."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import accelerate
import torch

from distiller import __version__
from distiller.build import check_run, epochs_of, plan_updates
from distiller.cache.filling import Batching, Filling, Measured, check_room, claim, plan_layout, remove_partial
from distiller.cache.key import content_key
from distiller.cache.layout import Layout, shard_name
from distiller.cache.manifest import MANIFEST_FILE, Manifest, remove_damaged
from distiller.config import Recipe
from distiller.devices import teacher_dtype
from distiller.errors import UserError
from distiller.folder_lock import hold
from distiller.launch import World, open_world
from distiller.launch_deepspeed import is_deepspeed_launch
from distiller.launch_fsdp import wrapped_classes
from distiller.process import world_size
from distiller.ranks import Ranks
from distiller.tasks.base import Task
from distiller.teachers import PLACEMENTS
from distiller.teachers.base import Setup
from distiller.teachers.opening import decide


def make_cache(recipe: Recipe, repair: bool) -> None:
    """Writes, completes or repairs the cache in `teacher.cache`. Communicates.

    Raises UserError before any weight is read, but for a disk that turns out too small for what the first outputs take.
    """
    recipe, was_cached = _with_live_teacher(recipe)
    task = check_run(recipe, world_size(), is_deepspeed_launch())
    if not task.needs_live_teacher:
        raise UserError("distiller cache: this recipe's loss asks no live teacher, so there is nothing to keep of one")
    world = open_world(recipe, lambda fsdp: wrapped_classes(fsdp, task.student_skeleton(), task.block_classes))
    accelerator, folder = world.accelerator, Path(recipe.teacher.cache or "")
    ranks, dtype = Ranks.join(accelerator.device), teacher_dtype(recipe.teacher.dtype, accelerator.device)
    plan = plan_updates(recipe, task.num_samples, world.accumulation_steps, ranks.world_size)
    last_step = recipe.train.max_steps or (recipe.train.num_epochs or 1) * plan.updates_per_epoch
    draws = (recipe.cache.draws or epochs_of(plan, last_step)) if task.has_draws else 1
    for notice in world.notices:
        accelerator.print(f"note: {notice}")
    if was_cached:
        accelerator.print("note: teacher.placement=cached is for training; here the teacher's place is chosen (auto)")
    setup = decide(task.network, Setup(dtype, recipe.teacher, ranks, world.engine.startswith("deepspeed")))
    key = ranks.from_main(lambda: _claimed_key(folder, recipe, task, dtype))
    if not repair and ranks.from_main(lambda: (folder / MANIFEST_FILE).is_file()):
        accelerator.print(f"{folder} is complete already; nothing to do (--repair reads all of it, and mends it)")
        accelerator.end_training()
        return

    started = time.perf_counter()
    task.prepare_stages(accelerator, dtype)
    teacher = PLACEMENTS[setup.options.placement](task.network, setup)
    ranks.wait()
    data = task.run_stages(accelerator, teacher)
    batching = Batching(recipe.train.batch_size, world.accumulation_steps, recipe.train.num_workers)
    filling = Filling(folder, task, teacher, data, batching, ranks)
    measured = filling.measure()
    wanted = Layout(task.num_samples, draws, _per_shard(recipe, task, measured, batching.samples), recipe.seed)
    layout = ranks.from_main(lambda: plan_layout(folder, key, wanted))
    if repair:
        mine = range(ranks.rank, layout.num_shards, ranks.world_size)
        for names in ranks.gather(ranks.all_succeed(lambda: remove_damaged(folder, layout, mine))):
            for name in names:
                accelerator.print(f"cache: {name} is damaged; it will be made again")
    missing = filling.missing(layout)
    accelerator.print(_described(task, layout, measured, len(missing)))
    still = sum(len(layout.keys_of(shard)) for shard in missing) * measured.bytes_per_sample
    ranks.from_main(lambda: check_room(folder, still))
    filling.fill(layout, missing)
    if ranks.is_main:
        seconds = time.perf_counter() - started
        _finish(folder, key, task, layout, measured, recipe, world, setup.options.placement, seconds)
    teacher.close()
    ranks.wait()
    accelerator.end_training()


def _with_live_teacher(recipe: Recipe) -> tuple[Recipe, bool]:
    """The recipe as the command can run it, and whether it says `cached`, which is for training."""
    if recipe.teacher.placement != "cached":
        return recipe, False
    return recipe.model_copy(update={"teacher": recipe.teacher.model_copy(update={"placement": "auto"})}), True


def _claimed_key(folder: Path, recipe: Recipe, task: Task[Any, Any], dtype: torch.dtype) -> dict[str, Any]:
    key = content_key(recipe, task, dtype)
    claim(folder, key)
    try:
        hold(folder, "teacher.cache")
    except OSError as error:
        raise UserError(f"teacher.cache: {folder} cannot be written ({error.strerror}); give another folder") from error
    remove_partial(folder)
    return key


def _per_shard(recipe: Recipe, task: Task[Any, Any], measured: Measured, step: int) -> int:
    """Samples a file: whole requests, about `cache.shard_mib` of them, and no more than there are."""
    requests = int(recipe.cache.shard_mib * 2**20 / measured.bytes_per_sample) // step
    return min(max(1, requests), -(-task.num_samples // step)) * step


def _described(task: Task[Any, Any], layout: Layout, measured: Measured, num_missing: int) -> str:
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
    task: Task[Any, Any],
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
