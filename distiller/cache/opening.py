"""Opens the cache of a training run, checked against the recipe and across machines."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from distiller.cache.key import content_key
from distiller.cache.layout import Layout
from distiller.cache.manifest import MANIFEST_FILE, open_cache
from distiller.config.recipe import Recipe
from distiller.distributed.ranks import Ranks
from distiller.errors import AgreedUserError, UserError
from distiller.tasks.base import Task
from distiller.tasks.interfaces import Cacheable, missing_stage


def open_run_cache(recipe: Recipe, task: Task[Any, Any], dtype: torch.dtype, num_epochs: int) -> tuple[Layout, int]:
    """(Layout of the run's cache, epochs after which its draws repeat). Rank 0 calls it. Raises UserError."""
    if not task.needs_live_teacher:
        raise UserError("teacher.placement=cached: this recipe's loss asks no teacher; leave teacher.placement out")
    if not isinstance(task, Cacheable):
        raise UserError(
            f"teacher.placement=cached: the teacher's outputs of task.kind {recipe.task.kind} cannot be stored; leave "
            "teacher.placement out"
        )
    epochs = num_epochs if task.has_draws else 1
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
    """Raises UserError on all ranks if a machine sees another cache, such as an outdated copy. Communicates."""

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
