"""How many loader processes a rank gets, and how far they read ahead."""

from __future__ import annotations

import os
import time
from dataclasses import replace

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


@pytest.fixture
def reads(monkeypatch):
    """A read that takes as long as its attribute says on the second call, and far longer on the first."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Read:
        seconds, calls = 0.03, 0

        def __call__(self):
            self.calls += 1
            now[0] += 100.0 if self.calls == 1 else self.seconds

    return Read()


def test_what_the_recipe_gives_is_taken_and_nothing_is_read(reads):
    assert [choose_num_workers(number, reads, GPU_RANKS) for number in (0, 3)] == [0, 3]
    assert choose_num_workers("auto", reads, CPU_RANKS) == 0
    assert reads.calls == 0


@pytest.mark.parametrize(("num_ranks", "expected"), [(1, 5), (2, 2), (3, 1), (6, 0)])
def test_a_rank_takes_its_share_of_the_cores_but_one(reads, capsys, num_ranks, expected):
    assert choose_num_workers("auto", reads, replace(GPU_RANKS, local_world_size=num_ranks)) == expected
    said = capsys.readouterr().err
    share = f"{expected} loader processes a rank (train.num_workers auto: a micro-batch takes 30 ms to read, and a rank"
    assert said.startswith(share) if expected else not said


def test_many_cores_are_not_all_taken(reads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert choose_num_workers("auto", reads, GPU_RANKS) == MAX_AUTOMATIC


def test_what_is_read_at_once_needs_no_process(reads, capsys):
    reads.seconds = 0.9 * loader_processes.QUICK_S
    assert choose_num_workers("auto", reads, GPU_RANKS) == 0
    assert capsys.readouterr().err == ""


def test_a_long_folder_for_temporary_files_is_said(reads, capsys, monkeypatch):
    monkeypatch.setattr(loader_processes, "excess_socket_bytes", lambda: 1)
    assert choose_num_workers("auto", reads, GPU_RANKS) == 0
    assert "no loader processes, for which TMPDIR is too long" in capsys.readouterr().err
    choose_num_workers("auto", reads, replace(GPU_RANKS, rank=1))
    assert capsys.readouterr().err == ""


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
