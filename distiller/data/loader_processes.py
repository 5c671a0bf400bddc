"""How many processes load a rank's micro-batches, and how far ahead."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from torch.utils.data import DataLoader, Dataset

from distiller.data.loading import excess_socket_bytes
from distiller.distributed.process import initialize_loader_worker, print_to_stderr
from distiller.distributed.ranks import Ranks

QUICK_S = 0.002
"""A micro-batch that is read in less needs no process: handing it over takes about as long."""
SHARED_MEMORY = "/dev/shm"
MAX_AUTOMATIC = 8
"""Processes a rank; more have to be asked for."""


def cores_of_rank(ranks: Ranks) -> int:
    """CPU cores of this process, shared evenly with the other ranks of the node."""
    return len(os.sched_getaffinity(0)) // ranks.local_world_size


def choose_num_workers(
    given: int | Literal["auto"],
    reads: Sequence[Callable[[], object]],
    ranks: Ranks,
    *,
    micro_batches: int = 1,
    is_cpu_busy: bool = False,
) -> int:
    """The number that the recipe gives; for `auto` what this machine and the data ask for, which rank 0 says.

    None where a rank has no GPU, since the student computes on the same cores, or where the teacher does; and where a
    micro-batch is read in less than `QUICK_S`. Otherwise one for each core of the rank but the one that drives the GPU,
    up to `MAX_AUTOMATIC`, and as many as shared memory holds batches of. For `auto` on GPUs it communicates.

    Args:
        given: the recipe's `train.num_workers`.
        reads: each reads a micro-batch, another one if there are several; called where the answer is needed. The first
            one also imports what reading needs; the last one is timed.
        micro_batches: of an update.
        is_cpu_busy: whether the teacher computes on the CPU.
    """
    if given != "auto":
        return given
    if ranks.device.type != "cuda" or is_cpu_busy or not reads:
        return 0
    measured = ranks.gather(ranks.all_succeed(lambda: _measure(reads, ranks)))
    # The same for all ranks: what suits the slowest, and the one with least.
    read_s, batch_bytes = max(each.read_s for each in measured), max(each.batch_bytes for each in measured)
    cores, shared_bytes = min(each.cores for each in measured), min(each.shared_bytes for each in measured)
    count = max(min(cores - 1, MAX_AUTOMATIC), 0) if read_s >= QUICK_S else 0
    fitting = count
    while fitting and fitting * (prefetch_factor(fitting, micro_batches) or 0) * batch_bytes > shared_bytes:
        fitting -= 1
    if is_long := excess_socket_bytes() > 0:
        fitting = 0
    if ranks.is_main:
        read_ms = 1e3 * read_s
        text = (
            f"loader processes a rank: {fitting} (train.num_workers auto: a micro-batch takes {read_ms:.1f} ms to read"
        )
        if count and is_long:
            text = f"note: {text}, but TMPDIR is too long a path for any"
        elif fitting < count:
            text = f"note: {text}, but {SHARED_MEMORY}, through which batches pass, has no space for more"
        print_to_stderr(f"{text}, and a rank has {cores} CPU cores)")
    return fitting


class _Measured(NamedTuple):
    read_s: float
    batch_bytes: int
    cores: int
    shared_bytes: int


def _measure(reads: Sequence[Callable[[], object]], ranks: Ranks) -> _Measured:
    """Of this rank: the last micro-batch's time and size, its cores, and its share of free shared memory."""
    batch, read_s = None, 0.0
    for read in reads:
        started = time.perf_counter()
        batch = read()
        read_s = time.perf_counter() - started
    # Half of it is left to others; what is pickled is what passes through it.
    shared_bytes = shutil.disk_usage(SHARED_MEMORY).free // (2 * ranks.local_world_size)
    return _Measured(read_s, len(pickle.dumps(batch, protocol=5)), cores_of_rank(ranks), shared_bytes)


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
