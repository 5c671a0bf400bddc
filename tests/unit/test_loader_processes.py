"""How many loader processes a rank gets, how far they read ahead, and what is said where they cannot run."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import arbitrary_address
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from distiller import commands
from distiller.data import loader_processes
from distiller.data.loader_processes import MAX_AUTOMATIC, choose_num_workers, open_loader, prefetch_factor
from distiller.data.loading import batches_of
from distiller.distributed.process import initialize_loader_worker
from distiller.errors import RunError, UserError
from tests.toy_network import setup

CPU_RANKS = setup().ranks
GPU_RANKS = replace(CPU_RANKS, device=torch.device("cuda"))


@pytest.fixture(autouse=True)
def six_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))


class Reads:
    """Reads that take so many seconds by the clock, the first one longer."""

    def __init__(self, seconds: float, batch: object = ()) -> None:
        self.calls, self.now, self.seconds, self.batch = 0, 0.0, seconds, batch

    def __call__(self) -> object:
        self.calls += 1
        # The first one also imports something.
        self.now += 100.0 if self.calls == 1 else self.seconds
        return self.batch


@pytest.fixture
def reading(monkeypatch):
    def make(seconds: float = 0.03, batch: object = ()) -> list[Reads]:
        reads = Reads(seconds, batch)
        monkeypatch.setattr(time, "perf_counter", lambda: reads.now)
        return [reads, reads]

    return make


def test_what_the_recipe_gives_is_taken_and_nothing_is_read(reading):
    reads = reading()
    assert [choose_num_workers(number, reads, GPU_RANKS) for number in (0, 3)] == [0, 3]
    assert choose_num_workers("auto", reads, CPU_RANKS) == 0
    assert choose_num_workers("auto", reads, GPU_RANKS, is_cpu_busy=True) == 0
    assert reads[0].calls == 0


@pytest.mark.parametrize(("num_ranks", "expected"), [(1, 5), (2, 2), (3, 1), (6, 0)])
def test_a_rank_takes_its_share_of_the_cores_but_one(reading, capsys, num_ranks, expected):
    assert choose_num_workers("auto", reading(), replace(GPU_RANKS, local_world_size=num_ranks)) == expected
    assert capsys.readouterr().err == (
        f"loader processes a rank: {expected} (train.num_workers auto: a micro-batch takes 30.0 ms to read, and a rank "
        f"has {6 // num_ranks} CPU cores)\n"
    )


def test_many_cores_are_not_all_taken(reading, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert choose_num_workers("auto", reading(), GPU_RANKS) == MAX_AUTOMATIC


def test_what_is_read_at_once_needs_no_process(reading, capsys):
    assert choose_num_workers("auto", reading(0.9 * loader_processes.QUICK_S), GPU_RANKS) == 0
    assert "takes 1.8 ms to read" in capsys.readouterr().err
    assert choose_num_workers("auto", [], GPU_RANKS) == 0


def test_a_long_folder_for_temporary_files_is_said(reading, capsys, monkeypatch):
    monkeypatch.setattr(loader_processes, "excess_socket_bytes", lambda: 1)
    assert choose_num_workers("auto", reading(), GPU_RANKS) == 0
    assert "note: loader processes a rank: 0" in (said := capsys.readouterr().err)
    assert "TMPDIR is too long a path for any" in said
    choose_num_workers("auto", reading(), replace(GPU_RANKS, rank=1))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("free_mib", "num_ranks", "micro_batches", "expected"),
    [(64, 1, 1, 3), (16, 1, 1, 0), (1000, 1, 1, 5), (64, 2, 1, 1), (64, 1, 6, 3), (64, 1, 8, 0)],
)
def test_batches_ahead_fit_into_half_of_shared_memory(
    reading, capsys, monkeypatch, free_mib, num_ranks, micro_batches, expected
):
    """A process reads two batches of 5 MiB ahead, or its part of an update's; a container has 64 MiB."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free_mib * 2**20))
    batch = {"pixels": torch.zeros(5 * 2**20, dtype=torch.uint8)}
    ranks = replace(GPU_RANKS, local_world_size=num_ranks)
    assert choose_num_workers("auto", reading(batch=batch), ranks, micro_batches=micro_batches) == expected
    is_said = "/dev/shm, through which batches pass, has no space for more" in capsys.readouterr().err
    assert is_said == (expected < 6 // num_ranks - 1)


def test_together_they_read_the_next_update_ahead():
    for num_workers, micro_batches, factor in ((1, 1, 2), (2, 8, 4), (3, 8, 3), (8, 8, 2), (4, 1, 2)):
        assert prefetch_factor(num_workers, micro_batches) == factor
    assert prefetch_factor(0, 8) is None
    loader = open_loader([1, 2, 3], [[0, 1], [2]], list, 2, 9, CPU_RANKS)  # type: ignore[arg-type]
    assert loader.prefetch_factor == 5
    assert list(loader) == [[1, 2], [3]]


class _Fatal(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_killed_loader_process_is_one_line():
    loader = DataLoader(_Fatal(), num_workers=1, worker_init_fn=initialize_loader_worker)
    with pytest.raises(RunError, match=r"^DataLoader worker \(pid.*\) .*\(a data file that shrank") as caught:
        next(batches_of(loader))
    # Its frames keep the loader, and torch would raise for its dead process at every later SIGCHLD.
    del caught
    gc.collect()


@pytest.mark.parametrize("num_bytes", [75, 76])
def test_loader_processes_are_refused_where_their_sockets_paths_would_be_too_long(make_recipe, monkeypatch, num_bytes):
    """Of 76 bytes: there the workers fail, and the loop would wait for them for ever."""
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        folder = Path(parent, "x" * (num_bytes - len(parent) - 1))
        own = folder / "pymp-12345678"
        own.mkdir(parents=True)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        # As Python keeps it, without the finalizer that would remove it when the test is long over.
        monkeypatch.setattr(multiprocessing.current_process(), "_config", {"tempdir": str(own)})
        is_refused = num_bytes == 76
        too_long = pytest.raises(OSError, match="path too long") if is_refused else contextlib.nullcontext()
        with socket.socket(socket.AF_UNIX) as listener, too_long:
            listener.bind(arbitrary_address("AF_UNIX"))
        recipe = make_recipe(train={"max_steps": 1, "num_workers": 2})
        words = rf"num_workers is 2 .* {folder}, has a path of 76 bytes, 1 more than .*; set TMPDIR to a shorter"
        with pytest.raises(UserError, match=words) if is_refused else contextlib.nullcontext():
            commands.check(recipe, None)
        commands.check(make_recipe(train={"max_steps": 1, "num_workers": 0}), None)
