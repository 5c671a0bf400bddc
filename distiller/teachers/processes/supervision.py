"""Starts, watches and ends the processes of the teacher on this machine."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, final

from distiller.errors import RunError, UserError
from distiller.teachers.base import TeacherMemory
from distiller.teachers.processes.messages import Failure, Ready, Start

END_S = 30
"""How long a process has to end by itself once all ranks have gone."""

LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_")
"""How variables begin with which a launcher tells a process that it is one of several ranks."""


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
        running, pipes, addresses = [], [], []
        try:
            for start in starts:
                process, pipe = _launch(start)
                running.append(process)
                pipes.append(pipe)
            for start, process, pipe in zip(starts, running, pipes, strict=True):
                addresses.append(_wait_until_ready(start.device, process, pipe))
        except BaseException:
            for process in running:
                process.kill()
                process.wait()
            raise
        finally:
            for pipe in pipes:
                pipe.close()
        return TeacherProcesses(running, addresses)

    def close(self) -> None:
        """Waits until the processes have ended, which they do when all ranks have closed their connections."""
        for process in self._running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
            process.wait()


def new_authkey() -> bytes:
    """A secret of one run."""
    return secrets.token_bytes(32)


def _launch(start: Start) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    command = [sys.executable, "-m", "distiller.teachers.processes.server", str(theirs.fileno())]
    # For the import of this package itself; all other imports come after the whole path has been sent.
    package_parent = os.path.dirname(os.path.dirname(sys.modules["distiller"].__file__ or ""))
    paths = [package_parent, *filter(None, [environment.get("PYTHONPATH")])]
    process = subprocess.Popen(
        command,
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    with suppress(OSError):
        # It may have ended: then it is found out where its answer is waited for.
        ours.send(sys.path)
        ours.send(start)
    return process, ours


def _wait_until_ready(device: str, process: subprocess.Popen[bytes], pipe: Connection) -> Address:
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
