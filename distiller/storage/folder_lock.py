"""A lock on an output folder, so that one run at a time uses it. The kernel releases it when the process ends.

It is a POSIX record lock: it works over NFS, loader processes do not inherit it, and the lock file that a killed run
leaves behind blocks nobody.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from distiller.errors import UserError

LOCK_FILE = ".running"
_held: dict[str, int] = {}
"""Locked folder -> the descriptor of its lock file, in this process."""

WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def refuse_if_running(folder: Path) -> None:
    """UserError if another process holds the folder; changes nothing."""
    try:
        handle = os.open(folder / LOCK_FILE, os.O_RDWR)
    except OSError:
        # There is no lock file, or the folder cannot be written, which is reported when a run writes to it.
        return
    try:
        _lock(handle, folder)
    finally:
        os.close(handle)


def lock_folder(folder: Path, key: str = "output_dir") -> None:
    """Locks the folder until this process ends. UserError if another process holds it; OSError if it is read-only.

    `key` is the folder's recipe key, for messages.
    """
    handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    # Open until `remove_lock_file`: closing any descriptor of the file would end the lock.
    _lock(handle, folder, key)
    _held[os.path.abspath(folder)] = handle
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(holder).encode(), 0)


def remove_lock_file(folder: Path) -> None:
    """Removes the lock file at the end of a run, and then ends the lock: over NFS an open file cannot be removed."""
    (folder / LOCK_FILE).unlink(missing_ok=True)
    if (handle := _held.pop(os.path.abspath(folder), None)) is not None:
        os.close(handle)


@contextmanager
def file_lock(file: Path) -> Iterator[bool]:
    """Waits for a lock on a file and holds it in the block; not recorded as a run's, unlike `lock_folder`.

    Yields:
        whether it is held: False on a file system without locks.

    Raises:
        OSError: the file cannot be made.
    """
    lock = FileLock(file)
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        # filelock's own answer to ENOSYS is the second.
        if isinstance(error, OSError) and error.errno not in WITHOUT_LOCKS:
            raise
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _lock(handle: int, folder: Path, key: str = "output_dir") -> None:
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise UserError(
            f"{key}: {folder} is in use by another run ({_holder(handle)}); wait for its end, or choose another "
            f"folder with {key}=..."
        ) from error
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        print(f"note: {folder} lies on a file system without locks: two runs in it would not see each other")


def _holder(handle: int) -> str:
    try:
        held = json.loads(os.pread(handle, 4096, 0))
        return f"process {held['pid']} on {held['host']}, since {held['since']}"
    except (ValueError, KeyError, TypeError):
        return "which has just begun"
