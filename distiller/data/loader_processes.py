"""How many processes load a rank's micro-batches, and how far ahead."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch.utils.data import DataLoader, Dataset

from distiller.data.loading import excess_socket_bytes
from distiller.distributed.process import initialize_loader_worker, print_to_stderr
from distiller.distributed.ranks import Ranks

QUICK_S = 0.002
"""A micro-batch that is read in less needs no process: handing it over takes about as long."""
MAX_AUTOMATIC = 8
"""Processes a rank; more have to be asked for."""


def cores_of_rank(ranks: Ranks) -> int:
    """CPU cores of this process, shared evenly with the other ranks of the node."""
    return len(os.sched_getaffinity(0)) // ranks.local_world_size


def choose_num_workers(given: int | Literal["auto"], read: Callable[[], object], ranks: Ranks) -> int:
    """The number that the recipe gives; for `auto` what this machine and the data ask for, which rank 0 says.

    None where a rank has no GPU, since the student computes on the same cores, and where a micro-batch is read in less
    than `QUICK_S`. Otherwise one for each core of the rank but the one that drives the GPU, up to `MAX_AUTOMATIC`.

    Args:
        given: the recipe's `train.num_workers`.
        read: reads one micro-batch. Called twice, where the answer is needed; the second time the files are cached.
    """
    if given != "auto":
        return given
    if ranks.device.type != "cuda":
        return 0
    read()
    started = time.perf_counter()
    read()
    read_s = time.perf_counter() - started
    count = max(min(cores_of_rank(ranks) - 1, MAX_AUTOMATIC), 0)
    if read_s < QUICK_S or not count:
        return 0
    why = f"train.num_workers auto: a micro-batch takes {1e3 * read_s:.0f} ms to read"
    if excess_socket_bytes() > 0:
        text = f"note: no loader processes, for which TMPDIR is too long a path ({why})"
        count = 0
    else:
        text = f"{count} loader processes a rank ({why}, and a rank has {cores_of_rank(ranks)} CPU cores)"
    if ranks.is_main:
        print_to_stderr(text)
    return count


def prefetch_factor(num_workers: int, micro_batches: int) -> int | None:
    """Micro-batches that each process reads ahead: together those of the next update. None without processes.

    An update takes all of its micro-batches from the loader before it computes.
    """
    return max(2, -(-micro_batches // num_workers)) if num_workers else None


def open_loader(
    data: Dataset[Any],
    batch_sampler: Iterable[list[Any]],
    collate: Callable[..., Any],
    num_workers: int,
    micro_batches: int,
    ranks: Ranks,
) -> DataLoader[Any]:
    """Loads a rank's micro-batches, into page-locked memory where it has a GPU.

    `micro_batches`: of an update.
    """
    return DataLoader(
        data,
        batch_sampler=batch_sampler,
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=ranks.device.type == "cuda",
        worker_init_fn=initialize_loader_worker,
        prefetch_factor=prefetch_factor(num_workers, micro_batches),
    )
