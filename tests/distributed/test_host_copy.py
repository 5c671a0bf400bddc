"""One host copy a node: shared, counted as the system counts it, and gone when its processes are."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.teachers.weights import host_copy
from distiller.teachers.weights.host_copy import HostCopy, open_named
from tests.distributed.ranks import on_ranks

ALONE = Ranks(torch.device("cpu"), 0, 1, 0, 1, None, None)
SIZES = [2**20, 256, 2**22]


def mapped_bytes(name: str) -> dict[str, int]:
    """What the system says of this process's mapping of a file: its size, and the pages that are in memory."""
    figures = {"Size": 0, "Rss": 0, "Pss": 0}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = name in line
        elif inside and line.split(":")[0] in figures:
            figures[line.split(":")[0]] += int(line.split()[1]) * 1024
    return figures


def share(folder: Path | None) -> tuple[list[int], dict[str, int], str]:
    """Rank 0 fills, every rank adds its own mark; what each rank then sees."""
    from accelerate import PartialState

    PartialState(cpu=True)
    ranks = Ranks.join(torch.device("cpu"))
    opener = None if folder is None else lambda size, world: open_named(size, world, [folder])
    copy = HostCopy.make(SIZES, ranks, opener)
    if ranks.is_local_main:
        for number in range(len(SIZES)):
            copy.piece(number).fill_(number + 1)
    ranks.node_barrier()
    copy.piece(1)[100 + ranks.rank] = 50 + ranks.rank
    ranks.node_barrier()
    seen = [int(copy.piece(number)[-1]) for number in range(3)] + copy.piece(1)[100:102].tolist()
    figures = mapped_bytes(host_copy.NAME)
    left = ",".join(os.listdir(folder)) if folder else ""
    ranks.node_barrier()
    copy.close()
    return seen, figures, left


@pytest.mark.parametrize("is_named", [False, True])
def test_two_ranks_share_one_copy(tmp_path, is_named):
    results = on_ranks(2, share, tmp_path if is_named else None)
    for seen, figures, left in results:
        assert seen == [1, 2, 3, 50, 51]
        # A named file has no name any more while it is in use.
        assert left == ""
        assert figures["Size"] == pytest.approx(sum(SIZES), rel=0.02)
    # Each page counts in full for one rank, or by half for both.
    assert sum(figures["Pss"] for _, figures, _ in results) == pytest.approx(sum(SIZES), rel=0.02)


def test_a_name_that_a_killed_run_left_is_removed_and_the_others_are_not(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale, alive = (tmp_path / f"{host_copy.NAME}-{pid}-abc" for pid in (dead.pid, os.getpid()))
    stale.write_bytes(b"x")
    alive.write_bytes(b"x")
    os.close(open_named(4096, ALONE, [tmp_path]))
    assert os.listdir(tmp_path) == [alive.name]


def test_a_shared_memory_that_is_too_small_is_passed_over(tmp_path, monkeypatch):
    small, large = tmp_path / "shm", tmp_path / "tmp"
    small.mkdir()
    large.mkdir()
    usage = host_copy.shutil.disk_usage

    def disk_usage(folder: Path):
        found = usage(folder)
        return found._replace(free=64 * 2**20) if folder == small else found

    monkeypatch.setattr(host_copy.shutil, "disk_usage", disk_usage)
    descriptor = open_named(100 * 2**20, ALONE, [small, large])
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(large))
    os.close(descriptor)
    with pytest.raises(UserError, match=r"takes 0\.10 GiB.*--shm-size.*teacher\.placement=disk"):
        open_named(100 * 2**20, ALONE, [small])


def test_too_little_host_memory_is_refused(monkeypatch):
    monkeypatch.setattr(host_copy, "free_host_bytes", lambda: 2**20)
    with pytest.raises(UserError, match=r"host copy takes 0\.00 GiB.*teacher\.placement=disk"):
        HostCopy.make(SIZES, ALONE)


def make_on_a_machine_of_its_own() -> str:
    """Each rank is a machine; the second has too little memory."""
    from accelerate import PartialState

    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    PartialState(cpu=True)
    ranks = Ranks.join(torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copy, "free_host_bytes", lambda: 2**20 if ranks.rank == 1 else 2**30)
        with pytest.raises(UserError) as caught:
            HostCopy.make(SIZES, ranks)
    return str(caught.value)


def test_one_machine_s_lack_of_memory_is_raised_on_all_machines():
    for message in on_ranks(2, make_on_a_machine_of_its_own):
        assert "the teacher's host copy takes" in message


def test_nothing_is_left_after_kill_9(tmp_path):
    """The memory has no name, so nothing could be left: not in /dev/shm and not in the folder for files."""
    script = """
        import os, sys, torch
        from distiller.distributed.ranks import Ranks
        from distiller.teachers.weights.host_copy import HostCopy
        copy = HostCopy.make([2**22], Ranks(torch.device("cpu"), 0, 1, 0, 1, None, None))
        copy.piece(0).fill_(7)
        print("ready", flush=True)
        sys.stdin.read()
    """
    before = set(os.listdir("/dev/shm")) | set(os.listdir(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    during = set(os.listdir("/dev/shm")) | set(os.listdir(tmp_path))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    mine = {name for name in during - before if host_copy.NAME in name}
    assert not mine
