"""All processes of a run start themselves again, with other arguments.

A rank that waits in a collective, for a rank that failed, cannot be called back from there. But its process can be
replaced (exec), whatever its threads wait for: its GPU memory is freed, and its launcher sees the same process. So the
rank that asks tells the others through the store with which torch's process group was made, where a thread of each
rank looks. The new processes meet at a store of their own: the old one holds the old group's keys.
"""

# Names that torch exports lazily.
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, final

import psutil

from distiller.distributed.process import print_to_stderr, rank, world_size

if TYPE_CHECKING:
    from torch.distributed import Store

ASKED, PORT, SEEN = "distiller/restart", "distiller/restart/port", "distiller/restart/seen"
POLL_S = 0.2
PATIENCE = timedelta(seconds=60)
"""For the other ranks to see that they are asked to start again."""

_command: list[str] | None = None
_one_restart = threading.Lock()


def allow_restart() -> None:
    """Called by the program's start alone: the process is distiller's, and its command line starts it again."""
    global _command
    _command = list(sys.orig_argv)


def can_restart() -> bool:
    """Whether this process may be replaced: not where another program, a test say, called distiller's functions."""
    return _command is not None


def restart_all(arguments: Sequence[str], message: str) -> NoReturn:
    """Replaces the processes of all ranks; this rank is the one that asks. Several may ask the same at the same time.

    Args:
        arguments: added to the command line.
        message: one line that is printed once.
    """
    print_to_stderr(message)
    store = _connect()
    if store is not None:
        store.set(ASKED, "\n".join(arguments))
    _restart(arguments, store)


@final
class RestartWatch:
    """Looks, in a thread, whether another rank asks all to start again; then this process is replaced."""

    def __init__(self) -> None:
        """Watches from now on, where there are other ranks and the process may be replaced."""
        self._is_over = threading.Event()
        self._store = _connect() if can_restart() else None
        self._thread = threading.Thread(target=self._watch, name="restart-watch", daemon=True)
        if self._store is not None:
            self._thread.start()

    def look(self) -> None:
        """Replaces this process if another rank has asked for it; an error of this rank may be that rank's going."""
        if self._store is None:
            return
        # Where the store is gone, the run ends otherwise.
        with suppress(RuntimeError):
            if self._store.check([ASKED]):
                _restart(self._store.get(ASKED).decode().split("\n"), self._store)

    def close(self) -> None:
        """Looks no more. Does not return where the thread has begun to replace this process."""
        self._is_over.set()
        if self._store is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(POLL_S):
            self.look()


def _connect() -> Store | None:
    """A connection of its own to the store of the process group; None in a run of one process."""
    if world_size() == 1:
        return None
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=PATIENCE)


def _restart(arguments: Sequence[str], store: Store | None) -> NoReturn:
    assert _command is not None
    # Main thread and watch may come here both; the second waits until the process is replaced.
    _one_restart.acquire()
    if store is not None:
        os.environ["MASTER_PORT"] = _agree_on_port(store)
        # From now on rank 0 serves the store, as without torch's agent.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    # Loaders, a tracker's service, a teacher's processes: they look for the end of a process that does not end.
    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=PATIENCE.total_seconds())
    sys.stdout.flush()
    sys.stderr.flush()
    # What the driver and libraries hold open must not live on in the new program. Their threads use it until then.
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if int(name) > 2:
                os.set_inheritable(int(name), False)
    os.execv(sys.executable, [sys.executable, *_command[1:], *arguments])


def _agree_on_port(store: Store) -> str:
    """A port that is free on rank 0's machine, which rank 0 found; every rank has read it when rank 0 returns."""
    if rank() == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            store.set(PORT, str(probe.getsockname()[1]))
    port = store.get(PORT).decode()
    # Rank 0 may serve this store: it goes last.
    count, ends = store.add(SEEN, 1), time.monotonic() + PATIENCE.total_seconds()
    while rank() == 0 and count < world_size() and time.monotonic() < ends:
        time.sleep(POLL_S / 10)
        count = store.add(SEEN, 0)
    return port
