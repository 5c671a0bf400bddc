"""A run whose updates wait for the loader says so once, with what to change."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from distiller.training.data_wait import MAX_SHARE, DataWaitNotice
from tests.toy_network import setup

RANKS = setup().ranks


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))


def test_long_waits_are_said_once(capsys):
    notice = DataWaitNotice(0, RANKS)
    notice.check({"step": 100.0, "data": 100 * MAX_SHARE})
    assert capsys.readouterr().err == ""
    for _ in range(2):
        notice.check({"step": 100.0, "data": 12.0})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: updates wait for data 12% of their time; some loader processes may hide that")
    assert "train.num_workers: this rank has 0 of them" in line


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_rank_0_says_it(capsys, rank, lines):
    DataWaitNotice(2, replace(RANKS, rank=rank)).check({"step": 1.0, "data": 0.9})
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    assert all("more loader processes" in line and "this rank has 2 of them" in line for line in said)


@pytest.mark.parametrize(("num_workers", "num_ranks"), [(3, 1), (0, 4), (1, 2)])
def test_nothing_is_advised_where_no_core_is_left(capsys, num_workers, num_ranks):
    DataWaitNotice(num_workers, replace(RANKS, local_world_size=num_ranks)).check({"step": 1.0, "data": 0.9})
    assert capsys.readouterr().err == ""
