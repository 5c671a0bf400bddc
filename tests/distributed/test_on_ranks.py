"""What the tests on ranks rely on: ranks are fresh, differ as processes do, and never keep a test waiting."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.distributed import ranks
from tests.distributed.rank_host import RankHost
from tests.distributed.ranks import on_ranks

LEFT_BEHIND: list[int] = []


def look(mark: int) -> tuple[list[str | None], str, list[int], str | None, int]:
    LEFT_BEHIND.append(mark)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return [os.environ[name] for name in names], os.getcwd(), LEFT_BEHIND, os.environ.get("MARK"), hash("a word")


def test_every_call_has_fresh_ranks_in_the_state_of_the_caller(monkeypatch, tmp_path):
    on_ranks(3, look, 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARK", "2")
    found = on_ranks(3, look, 2)
    assert [numbers for numbers, *_ in found] == [[str(rank), str(rank), "3", "3"] for rank in range(3)]
    assert {(folder, *left, mark) for _, folder, left, mark, _ in found} == {(str(tmp_path), 2, "2")}
    # So that an order which follows from a hash shows.
    assert found[0][-1] != found[1][-1]


def fail_on_the_last() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("no such thing")


def end_on_the_last(number: signal.Signals) -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), number)


def sleep() -> None:
    time.sleep(100)


def test_what_becomes_of_a_rank_is_told():
    with pytest.raises(AssertionError, match=r"rank 1:\n(.*\n)*ValueError: no such thing"):
        on_ranks(2, fail_on_the_last)
    with pytest.raises(AssertionError, match=r"rank 1:\nno result within 120 s, exit code -9"):
        on_ranks(2, end_on_the_last, signal.SIGKILL)


def test_a_rank_that_does_not_end_is_ended(capfd):
    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 0:\nno result within 1 s, exit code 1"):
        on_ranks(2, sleep, timeout_s=1)
    assert time.monotonic() - started < 10


def test_new_interpreters_do_as_forks_do_and_hosts_that_do_not_answer_are_dropped(monkeypatch):
    """With GPUs ranks are not forks."""
    hosts = [RankHost(forks=False), RankHost(forks=False)]
    monkeypatch.setattr(ranks, "_hosts", [*hosts])
    assert on_ranks(1, look, 4)[0][2] == [4]
    os.killpg(hosts[1].group, signal.SIGKILL)
    with pytest.raises((EOFError, OSError)):
        on_ranks(2, look, 5)
    assert ranks._hosts == []
