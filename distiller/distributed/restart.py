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

ASKED, PORT, NUM_READY, NUM_GONE = "asked", "port", "ready", "gone"
"""Keys of the store: the arguments, the new store's port, and how many ranks have read both, and have left."""
MARK = "DISTILLER_RESTARTED"
"""A variable that a replaced process has."""
POLL_S = 0.5
PATIENCE = timedelta(seconds=60)
"""For the other ranks to see that they are asked to start again."""

_command: list[str] | None = None
_environment: dict[str, str] = {}
_one_restart = threading.Lock()


def allow_restart() -> None:
    """Called by the program's start alone: the process is distiller's, and its command line starts it again."""
    global _command, _environment
    # Libraries write into the environment what is of this process alone.
    _command, _environment = list(sys.orig_argv), dict(os.environ)
    if os.environ.pop(MARK, None):
        # Loaders, a tracker's service, a teacher's processes: they wait for the end of a process that has not ended.
        children = psutil.Process().children(recursive=True)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=PATIENCE.total_seconds())


def can_restart() -> bool:
    """Whether this process may be replaced: not where another program, a test say, called distiller's functions."""
    return _command is not None


def restart_all(arguments: Sequence[str], message: str) -> None:
    """Replaces the processes of all ranks; this rank is the one that asks. Several may ask the same at the same time.

    Returns where the other ranks cannot be told any more.

    Args:
        arguments: added to the command line.
        message: one line that is printed once.
    """
    try:
        store = _connect()
        if store is not None:
            # The first rank's arguments are those of all.
            arguments = store.compare_set(ASKED, "", "\n".join(arguments)).decode().split("\n")
    except RuntimeError:
        return
    print_to_stderr(message)
    _restart(arguments, store)


@final
class RestartWatch:
    """Looks, in a thread, whether another rank asks all to start again; then this process is replaced."""

    def __init__(self) -> None:
        """Watches from now on, where there are other ranks and the process may be replaced."""
        self._is_over = threading.Event()
        self._store = None
        # Without a store that can be reached, a run that fails ends.
        with suppress(RuntimeError):
            self._store = _connect() if can_restart() else None
        self._thread = threading.Thread(target=self._watch, name="restart-watch", daemon=True)
        if self._store is not None:
            self._thread.start()

    def restart_if_asked(self) -> None:
        """Replaces this process if another rank has asked for it. To be called where this rank failed: the other one's
        process may have gone meanwhile, and that be the reason."""
        if self._store is None:
            return
        try:
            is_asked = self._store.check([ASKED])
            arguments = self._store.get(ASKED).decode().split("\n") if is_asked else []
        except RuntimeError:
            # The store is gone: the run ends otherwise.
            self._is_over.set()
            return
        if is_asked:
            _restart(arguments, self._store)

    def close(self) -> None:
        """Looks no more. Does not return where the thread has begun to replace this process."""
        self._is_over.set()
        if self._store is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(POLL_S):
            self.restart_if_asked()


def _connect() -> Store | None:
    """A connection of its own to the store of the process group; None in a run of one process."""
    if world_size() == 1:
        return None
    from torch.distributed import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # A launcher that restarts failed ranks serves them the same store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"distiller/restart-{attempt}", TCPStore(address, port, is_master=False, timeout=PATIENCE))


def _restart(arguments: Sequence[str], store: Store | None) -> NoReturn:
    assert _command is not None
    # Main thread and watch may come here both; the second waits until the process is replaced.
    _one_restart.acquire()
    environment = _environment | {MARK: "1"}
    if store is not None:
        try:
            environment["MASTER_PORT"] = _agree_on_port(store)
        except RuntimeError as error:
            print_to_stderr(f"distiller, rank {rank()}: the ranks did not start again together: {error}")
            os._exit(1)
        # From now on rank 0 serves the store, as without torch's agent.
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    # What the driver and libraries hold open must not live on in the new program. Their threads use it until then.
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if int(name) > 2:
                os.set_inheritable(int(name), False)
    os.execve(sys.executable, [sys.executable, *_command[1:], *arguments], environment)


def _agree_on_port(store: Store) -> str:
    """A port that is free on rank 0's machine, which rank 0 found. Returns when all ranks are here, on rank 0 last.

    Raises RuntimeError where one does not come.
    """
    if rank() == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            store.set(PORT, str(probe.getsockname()[1]))
    port = store.get(PORT).decode()
    # A rank that leaves ends what the others wait for: all must know why. And rank 0 may serve this store.
    _count(store, NUM_READY, world_size())
    if rank() == 0:
        _count(store, NUM_GONE, world_size())
    else:
        store.add(NUM_GONE, 1)
    return port


def _count(store: Store, key: str, expected: int) -> None:
    """Adds this rank, and waits until so many have been added."""
    count, ends = store.add(key, 1), time.monotonic() + PATIENCE.total_seconds()
    while count < expected:
        if time.monotonic() > ends:
            raise RuntimeError(f"{count} of {expected} ranks came in {PATIENCE.total_seconds():.0f} s")
        time.sleep(0.01)
        count = store.add(key, 0)
