"""How many loader processes a rank gets, and how far they read ahead."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from distiller.data import loader_processes
from distiller.data.loader_processes import MAX_AUTOMATIC, choose_num_workers, open_loader, prefetch_factor
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


def test_a_long_folder_for_temporary_files_is_said(reading, capsys, monkeypatch):
    monkeypatch.setattr(loader_processes, "excess_socket_bytes", lambda: 1)
    assert choose_num_workers("auto", reading(), GPU_RANKS) == 0
    assert "note: loader processes a rank: 0" in (said := capsys.readouterr().err)
    assert "TMPDIR is too long a path for any" in said
    choose_num_workers("auto", reading(), replace(GPU_RANKS, rank=1))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("free_mib", "expected"), [(64, 3), (16, 0), (1000, 5)])
def test_batches_ahead_fit_into_half_of_shared_memory(reading, capsys, monkeypatch, free_mib, expected):
    """A process reads two batches of 5 MiB ahead; a container has 64 MiB."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free_mib * 2**20))
    batch = {"pixels": torch.zeros(5 * 2**20, dtype=torch.uint8)}
    assert choose_num_workers("auto", reading(batch=batch), GPU_RANKS) == expected
    assert ("/dev/shm, through which batches pass, has no space for more" in capsys.readouterr().err) == (expected < 5)


def test_together_they_read_the_next_update_ahead():
    for num_workers, micro_batches in ((1, 1), (2, 8), (3, 8), (8, 8), (4, 1)):
        factor = prefetch_factor(num_workers, micro_batches)
        assert factor is not None
        assert factor * num_workers >= micro_batches
        assert factor >= 2
    assert prefetch_factor(0, 8) is None
    loader = open_loader([1, 2, 3], [[0, 1], [2]], list, 2, 9, CPU_RANKS)  # type: ignore[arg-type]
    assert loader.prefetch_factor == 5
    assert list(loader) == [[1, 2], [3]]
