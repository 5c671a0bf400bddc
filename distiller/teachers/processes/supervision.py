"""Starts, watches and ends the processes of the teacher on this machine."""

from __future__ import annotations

import os
import pickle
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, final

from distiller.distributed.child_process import command
from distiller.errors import RunError, UserError
from distiller.teachers.base import TeacherMemory
from distiller.teachers.processes.messages import Failure, Ready, Start

END_S = 30
"""How long a process has to end by itself once all ranks have gone."""

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
LAUNCHERS += ("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT")
"""Variables with which a launcher tells a process that it is one of several ranks."""
PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_")
"""How others begin."""


@final
@dataclass(frozen=True)
class Address:
    """Where a process of the teacher is asked: its device's name, its port, and the weights' bytes."""

    device: str
    port: int
    memory: TeacherMemory


@final
class TeacherProcesses:
    """The processes on this machine; on the rank that started them, whose children they are."""

    def __init__(self, running: Sequence[subprocess.Popen[bytes]], addresses: list[Address]) -> None:
        """Use `start`."""
        self._running, self.addresses = running, addresses

    @staticmethod
    def start(starts: Sequence[Start]) -> TeacherProcesses:
        """Starts a process for each of `starts` and waits until all have loaded the teacher, however long that takes.

        Raises:
            UserError: one of them refused to load it; before it has read a weight.
            RunError: one of them failed or ended.
        """
        # Before any is started: what cannot be sent is found out here.
        sent = [pickle.dumps(start) for start in starts]
        running: list[subprocess.Popen[bytes]] = []
        pipes: dict[Connection, int] = {}
        addresses: dict[int, Address] = {}
        try:
            for number in range(len(starts)):
                process, pipe = _launch()
                running.append(process)
                pipes[pipe] = number
            for pipe, number in pipes.items():
                # It may have ended: then it is found out where its answer is waited for.
                with suppress(OSError):
                    pipe.send_bytes(pickle.dumps(sys.path))
                    pipe.send_bytes(sent[number])
            while len(addresses) < len(starts):
                waiting = [pipe for pipe, number in pipes.items() if number not in addresses]
                # In the order in which they answer: one that fails need not wait for the others.
                for pipe in wait(waiting):
                    assert isinstance(pipe, Connection)
                    number = pipes[pipe]
                    addresses[number] = _read_answer(starts[number].device, running[number], pipe)
        except BaseException:
            for process in running:
                process.kill()
                process.wait()
            raise
        finally:
            for pipe in pipes:
                pipe.close()
        return TeacherProcesses(running, [addresses[number] for number in range(len(starts))])

    def kill(self) -> None:
        """Ends the processes at once."""
        for process in self._running:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Waits until the processes have ended, which they do when all ranks have closed their connections."""
        limit = time.monotonic() + END_S
        for process in self._running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(limit - time.monotonic(), 0.1))
            process.kill()
            process.wait()


def new_authkey() -> bytes:
    """A secret of one run."""
    return secrets.token_bytes(32)


def _launch() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    kept = [name for name in os.environ if name not in LAUNCHERS and not name.startswith(PREFIXES)]
    environment = {name: os.environ[name] for name in kept}
    # For the import of this package itself; all other imports come after the whole path has been sent.
    package_parent = os.path.dirname(os.path.dirname(sys.modules["distiller"].__file__ or ""))
    paths = [package_parent, *filter(None, [environment.get("PYTHONPATH")])]
    process = subprocess.Popen(
        command("distiller.teachers.processes.server", str(theirs.fileno())),
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    return process, ours


def _read_answer(device: str, process: subprocess.Popen[bytes], pipe: Connection) -> Address:
    where = f"the teacher's process on {device}"
    try:
        message: Any = pipe.recv()
    except (EOFError, ConnectionError) as error:
        code = process.wait()
        raise RunError(f"{where} ended with exit code {code} while it loaded; its own message is above") from error
    if isinstance(message, Failure):
        kind = UserError if message.is_user_error else RunError
        raise kind(f"{where}: {message.text}")
    assert isinstance(message, Ready)
    return Address(device, message.port, message.memory)
