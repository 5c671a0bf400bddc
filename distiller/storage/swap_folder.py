"""A folder for weights that wait on a local disk: one a process, removed by it, or by the next run if it was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from distiller.errors import UserError

PREFIX = "distiller-swap-"
LOCK = "in-use"


class SwapFolder:
    """Locked as long as its process lives, however that ends: so that another run can tell what was left behind."""

    def __init__(self, parent: Path, key: str = "teacher.nvme_path") -> None:
        """Removes what killed runs left in `parent`. Raises UserError when it cannot be written to.

        `key` is what the user calls it.
        """
        try:
            parent.mkdir(parents=True, exist_ok=True)
            # One at a time: a folder that is made and not yet locked would look abandoned.
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
        """Removes the folder and all that is in it."""
        self._lock.release()
        shutil.rmtree(self.path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder itself, which leaves no file in it."""
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
    except Timeout:
        return
    lock.release()
    shutil.rmtree(folder)
