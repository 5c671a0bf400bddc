"""A process's folder for weights offloaded to a local disk; removed by it, or by the next run if it was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from filelock import FileLock, Timeout

from distiller.errors import UserError

PREFIX = "distiller-swap-"
LOCK = "in-use"


@final
class SwapFolder:
    """A folder with a lock that ends with its process, so that another run can tell whether it was abandoned."""

    def __init__(self, parent: Path, key: str = "teacher.nvme_path") -> None:
        """Removes abandoned folders in `parent` and makes a new one. UserError if `parent` is not writable.

        `key` is the setting that names `parent`, for messages.
        """
        try:
            parent.mkdir(parents=True, exist_ok=True)
            # One process at a time: a folder that is not yet locked would look abandoned.
            with _locked(parent):
                for folder in parent.glob(f"{PREFIX}*/"):
                    _remove_if_abandoned(folder)
                self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
                self._lock = FileLock(self.path / LOCK)
                self._lock.acquire()
        except OSError as error:
            raise UserError(
                f"{key}: {parent} cannot be written to ({error.strerror}); give a folder on a local disk"
            ) from error

    def remove(self) -> None:
        """Removes the folder and its content."""
        # Between the two, a run that begins would take the folder for an abandoned one.
        with _locked(self.path.parent):
            self._lock.release()
            shutil.rmtree(self.path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks the folder itself, without a lock file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_if_abandoned(folder: Path) -> None:
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except (Timeout, PermissionError):
        # In use, or another user's.
        return
    lock.release()
    shutil.rmtree(folder)
