"""`distiller cache`: builds what a training run builds of data and teacher, and writes the outputs down."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch.utils.data import Dataset

from distiller import __version__
from distiller.build import check_run
from distiller.cache.key import content_key
from distiller.cache.layout import Layout, samples_per_shard, shard_name
from distiller.cache.manifest import MANIFEST_FILE, Manifest, open_cache, remove_damaged
from distiller.cache.shards import remove_partial
from distiller.cache.writing import Batching, CacheWriter, Measured, check_free_space, claim, plan_layout
from distiller.config.recipe import Recipe
from distiller.data.loader_processes import choose_num_workers
from distiller.data.rng import sample_order
from distiller.distributed.process import world_size
from distiller.errors import RunError, UserError
from distiller.launch.deepspeed import is_deepspeed_launch
from distiller.run_folder.output_dir import check_shared
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
    teacher_setup,
)
from distiller.storage.folder_lock import lock_folder
from distiller.storage.stage_folders import CACHED_STAGES
from distiller.tasks.interfaces import Cacheable, Staged, notices_of
from distiller.teachers.base import Teacher
from distiller.teachers.factory import resolve_placement

COMPARED_TOKENS = 8192
"""Counted tokens, over which forms are compared."""
CacheSession = Session[Cacheable[Any, Any]]


def make_cache(recipe: Recipe, repair: bool = False, compare: bool = False) -> None:
    """Writes, completes or repairs the cache in `teacher.cache`; or compares what could be stored, and writes nothing.

    Communicates.

    Raises UserError before any weight is read, but for a disk that turns out too small for what the first outputs take.
    """
    recipe, was_cached = _with_live_teacher(recipe)
    task = _check_cacheable(recipe)
    session = join_world(recipe, task)
    if compare and task.cached_form()["kind"] == "whole":
        session.accelerator.print(
            "cache: this task's outputs are stored whole, which is exact; there is nothing to compare"
        )
        session.accelerator.end_training()
        return
    print_notices(session, [*session.world.notices, *notices_of(task)])
    if was_cached:
        session.accelerator.print(
            "note: teacher.placement=cached is for training; here the teacher's place is chosen (auto)"
        )
    setup = resolve_placement(task.network, teacher_setup(session))
    check_same_data(task, session.ranks)
    check_stages_shared(session)

    started = time.perf_counter()
    # Before the key: a teacher that is trained first has no weights until then.
    prepare_stages(session)
    key = None if compare else _claim_folder(session)
    if key is None or repair or not _is_complete(session, key):
        teacher, data = load_teacher_and_data(session, setup)
        assert teacher is not None, "a setup is given"
        measure_quantization(session, setup, teacher, data)
        if key is None:
            _compare(session, teacher, data)
        else:
            _write(session, key, teacher, data, repair, setup.options.placement, started)
        teacher.close()
    session.ranks.barrier()
    session.accelerator.end_training()


def _with_live_teacher(recipe: Recipe) -> tuple[Recipe, bool]:
    """The recipe as the command can run it, and whether it says `cached`, which is for training."""
    if recipe.teacher.placement != "cached":
        return recipe, False
    return recipe.model_copy(update={"teacher": recipe.teacher.model_copy(update={"placement": "auto"})}), True


def _check_cacheable(recipe: Recipe) -> Cacheable[Any, Any]:
    """The recipe's task, checked as for training. Raises UserError where there is no teacher to store outputs of."""
    task = check_run(recipe, world_size(), is_deepspeed_launch())
    if not task.needs_live_teacher:
        raise UserError("distiller cache: this recipe's loss asks no live teacher, so there is nothing to keep of one")
    if not isinstance(task, Cacheable):
        raise UserError(f"distiller cache: the teacher's outputs of task.kind {recipe.task.kind} cannot be stored")
    return task


def _claim_folder(session: CacheSession) -> dict[str, Any]:
    """Makes the folder this content's, and returns the content's key. Communicates; raises UserError."""
    folder = _folder(session)
    key = session.ranks.broadcast_from_main(lambda: _claim_on_main(session, folder))
    check_shared(folder, session.ranks, "teacher.cache")
    print_missing_durability(session, folder)
    return key


def _claim_on_main(session: CacheSession, folder: Path) -> dict[str, Any]:
    key = content_key(session.recipe, session.task, session.teacher_dtype)
    claim(folder, key)
    try:
        lock_folder(folder, "teacher.cache")
    except OSError as error:
        raise UserError(f"teacher.cache: {folder} cannot be written ({error.strerror}); give another folder") from error
    remove_partial(folder)
    return key


def _is_complete(session: CacheSession, key: Mapping[str, Any]) -> bool:
    """Whether the cache is whole and has what this recipe asks of it; it then gets its stages. Communicates.

    Raises UserError where it is whole and lacks something.
    """
    folder, draws = _folder(session), _num_draws(session)

    def look() -> bool:
        if not (folder / MANIFEST_FILE).is_file():
            return False
        open_cache(folder, key, session.task.wanted, draws, draws)
        return True

    if not session.ranks.broadcast_from_main(look):
        return False
    session.ranks.broadcast_from_main(lambda: _copy_stages(session))
    session.accelerator.print(f"{folder} is complete already; nothing to do (--repair reads all of it, and mends it)")
    return True


def _write(
    session: CacheSession,
    key: Mapping[str, Any],
    teacher: Teacher,
    data: Dataset[Any],
    repair: bool,
    placement: str,
    started: float,
) -> None:
    """Asks the teacher for what is not there yet, and writes the manifest last. Communicates."""
    recipe, task, ranks, folder = session.recipe, session.task, session.ranks, _folder(session)
    size, micro_batches = recipe.train.batch_size, session.world.accumulation_steps

    def read(first: int) -> Any:
        return task.collate([data[0, i % task.num_samples] for i in range(first, first + size)])

    reads = [partial(read, first) for first in (0, size)]
    is_busy = placement == "cpu"
    num_workers = choose_num_workers(
        recipe.train.num_workers, reads, ranks, micro_batches=micro_batches, is_cpu_busy=is_busy
    )
    batching = Batching(size, micro_batches, num_workers)
    writer, draws = CacheWriter(folder, task, teacher, data, batching, ranks), _num_draws(session)
    measured = writer.measure()
    files = draws * measured.bytes_per_sample * task.num_samples / (recipe.cache.shard_mib * 2**20)
    per_shard = samples_per_shard(task.num_samples, draws, max(math.ceil(files), ranks.world_size), batching.samples)
    wanted = Layout(task.num_samples, draws, per_shard, recipe.seed)
    layout = ranks.broadcast_from_main(lambda: plan_layout(folder, key, wanted, measured.names))
    if repair:
        own = range(ranks.rank, layout.num_shards, ranks.world_size)
        for names in ranks.gather(ranks.all_succeed(lambda: remove_damaged(folder, layout, own, measured.names))):
            for name in names:
                session.accelerator.print(f"cache: {name} is damaged; it will be made again")
    missing = writer.missing(layout)
    session.accelerator.print(_describe(task, layout, measured, len(missing)))
    num_bytes = sum(layout.size_of(shard) for shard in missing) * measured.bytes_per_sample
    ranks.broadcast_from_main(lambda: check_free_space(folder, num_bytes))
    ranks.broadcast_from_main(lambda: _copy_stages(session))
    writer.fill(layout, missing)
    if ranks.is_main:
        _write_manifest(session, key, layout, measured, placement, time.perf_counter() - started)


def _compare(session: CacheSession, teacher: Teacher, data: Dataset[Any]) -> None:
    """Asks for the first rows of the first epoch, on every rank alike, and prints rank 0's figures. Communicates."""
    task, ranks, recipe = session.task, session.ranks, session.recipe
    order, size = sample_order(recipe.seed, 0, task.num_samples), recipe.train.batch_size
    batches, num_counted = [], 0
    while num_counted < COMPARED_TOKENS and len(batches) * size < len(order):
        keys = order[len(batches) * size : (len(batches) + 1) * size]
        batches.append(task.collate([data[0, sample_id] for sample_id in keys]))
        num_counted += task.count(batches[-1])
    batches = [task.to_device(batch, ranks.device) for batch in batches]
    outputs = [teacher.predict([task.request(batch)])[0] for batch in batches]
    if ranks.is_main:
        figures = task.compare_forms(batches, outputs)
        print(f"over {num_counted:,} counted tokens of the recipe's own data, beside the live teacher:\n{figures}")
    # Before any rank closes its part of the teacher.
    ranks.barrier()


def _copy_stages(session: CacheSession) -> None:
    """Puts what the outputs belong to beside them, so that the folder can be moved and read from any output_dir."""
    folder, task = _folder(session), session.task
    for stage in task.kept_stages(session.teacher_dtype) if isinstance(task, Staged) else ():
        try:
            if stage.is_complete:
                stage.copy_into(folder / CACHED_STAGES)
        except OSError as error:
            raise RunError(f"teacher.cache: {stage.folder} cannot be copied into {folder} ({error})") from error


def _describe(task: Cacheable[Any, Any], layout: Layout, measured: Measured, num_missing: int) -> str:
    of_draws = f" x {layout.draws} draws" if task.has_draws else ""
    mib = layout.num_items * measured.bytes_per_sample / 2**20
    return (
        f"cache: {layout.num_samples} samples{of_draws}, {measured.bytes_per_sample:,.0f} bytes a sample "
        f"({measured.bytes_per_token:,.1f} a token), about {mib:,.1f} MiB in all; "
        f"{num_missing} of {layout.num_shards} files to write"
    )


def _write_manifest(
    session: CacheSession,
    key: Mapping[str, Any],
    layout: Layout,
    measured: Measured,
    placement: str,
    seconds: float,
) -> None:
    """Marks the cache as complete and says what it takes. Rank 0 calls it."""
    folder, accelerator = _folder(session), session.accelerator
    sizes = tuple((folder / shard_name(shard)).stat().st_size for shard in range(layout.num_shards))
    per_token = sum(sizes) / layout.num_items * measured.bytes_per_token / measured.bytes_per_sample
    made_with = {
        "distiller": __version__,
        "torch": torch.__version__,
        **{name: version(name) for name in ("transformers", "diffusers") if name in sys.modules},
        "accelerate": accelerate.__version__,
        "device": accelerator.device.type,
        "placement": placement,
        "world_size": accelerator.num_processes,
        "batch_size": session.recipe.train.batch_size,
        "seconds": round(seconds, 1),
    }
    manifest = Manifest(
        key, layout, session.task.wanted, sizes, measured.bytes_per_sample, measured.bytes_per_token, made_with
    )
    manifest.write(folder)
    print(
        f"cache: {sum(sizes) / 2**20:,.1f} MiB in {layout.num_shards} files ({per_token:,.1f} bytes a token on the "
        f"disk), {seconds:.1f} s, complete in {folder}"
    )


def _folder(session: CacheSession) -> Path:
    return Path(session.recipe.teacher.cache or "")


def _num_draws(session: CacheSession) -> int:
    """Of each sample."""
    return (session.recipe.cache.draws or session.num_epochs) if session.task.has_draws else 1
