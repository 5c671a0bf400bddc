"""Where ranks are forked from: a process that has imported once what they need, and does nothing else.

A rank that imports torch, diffusers, transformers and DeepSpeed by itself takes 10 s of CPU before its first line.
A fork of such a process takes none and is as fresh: the host runs no test code, so nothing that a test leaves behind
reaches the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, final

IMPORTED = ("tests.placement_contract", "tests.toy_task", "tests.toy_causal_lm", "tests.toys", "pytest", "deepspeed")
"""Modules that most ranks need; deepspeed is an optional dependency."""
PATIENCE_S = 20
"""Seconds after its time limit in which a rank may print its stacks."""


@final
@dataclass(frozen=True)
class Call:
    """What the ranks of one world run.

    Attributes:
        work: the pickled function and its arguments; unpickled by the ranks, so that the host imports none of it.
        environment: all variables of a rank but those that say which rank it is.
        folder: the working directory.
        timeout_s: after so long a rank prints its stacks and ends.
    """

    work: bytes
    environment: Mapping[str, str]
    folder: str
    timeout_s: int


Outcome = tuple[Any, str | None]
"""A rank's result, or None and its traceback."""


@final
class RankHost:
    """A host, seen from the process that runs the tests. It is gone when that one is, and its ranks with it."""

    def __init__(self, forks: bool) -> None:
        """`forks`: whether ranks are forks of the host; otherwise new interpreters, which import for themselves."""
        self._connection, other = get_context("spawn").Pipe()
        self._process = get_context("spawn").Process(target=_serve, args=(other, forks))
        self._process.start()
        other.close()
        # Before multiprocessing waits for its processes at exit, since it began to do so at its import.
        atexit.register(self.close)

    @property
    def group(self) -> int:
        """The process group of the host and its ranks."""
        assert self._process.pid is not None
        return self._process.pid

    def send(self, call: Call, ranks: list[int]) -> None:
        """Starts some ranks of a world; `receive` must follow."""
        self._connection.send((call, ranks))

    def receive(self, timeout_s: float) -> dict[int, Outcome]:
        """What became of the ranks that were sent last; TimeoutError or EOFError if the host does not say."""
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s} s")
        return {rank: pickle.loads(outcome) for rank, outcome in self._connection.recv().items()}

    def close(self) -> None:
        """Kills the host and what is left of its ranks."""
        atexit.unregister(self.close)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        self._process.join()
        self._connection.close()


def _serve(connection: Connection, forks: bool) -> None:
    # A group of its own, with the ranks: they are killed together.
    os.setpgid(0, 0)
    if forks:
        for name in IMPORTED:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)
        # Imported objects stay: garbage collection would scan them in every rank, and copy the pages that it touches.
        gc.collect()
        gc.freeze()
    with contextlib.suppress(EOFError):
        while True:
            call, ranks = connection.recv()
            connection.send(_run(call, ranks, connection, "fork" if forks else "spawn"))


def _run(call: Call, ranks: list[int], connection: Connection, method: str) -> dict[int, bytes]:
    """The ranks' pickled outcomes, once all of them have ended or their time is up."""
    started: dict[Connection, tuple[int, BaseProcess]] = {}
    for rank in ranks:
        receiver, sender = get_context(method).Pipe(duplex=False)
        process = get_context(method).Process(target=_rank, args=(call, rank, sender))  # type: ignore[attr-defined]
        process.start()
        # Without a copy here, the rank's death closes the pipe.
        sender.close()
        started[receiver] = rank, process
    outcomes: dict[int, bytes] = {}
    open_pipes, limit = set(started), time.monotonic() + call.timeout_s + PATIENCE_S
    while open_pipes and (ready := wait([*open_pipes, connection], max(0.0, limit - time.monotonic()))):
        if connection in ready:
            # The tests' process has died: nobody reads the outcomes.
            os.killpg(0, signal.SIGKILL)
        for receiver in open_pipes.intersection(ready):
            open_pipes.remove(receiver)
            with contextlib.suppress(EOFError):
                outcomes[started[receiver][0]] = receiver.recv_bytes()
    for receiver, (rank, process) in started.items():
        process.join(10)
        process.kill()
        process.join()
        receiver.close()
        if rank not in outcomes:
            outcomes[rank] = pickle.dumps((None, f"no result within {call.timeout_s} s, exit code {process.exitcode}"))
    return outcomes


def _rank(call: Call, rank: int, sender: Connection) -> None:
    faulthandler.dump_traceback_later(call.timeout_s, exit=True)
    os.environ.clear()
    os.environ.update(call.environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(call.folder)
    try:
        function, arguments = pickle.loads(call.work)
        outcome = pickle.dumps((function(*arguments), None))
    except BaseException:
        outcome = pickle.dumps((None, traceback.format_exc()))
    sender.send_bytes(outcome)
    sender.close()
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
