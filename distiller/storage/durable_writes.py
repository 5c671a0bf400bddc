"""Writes of small files and folder entries that are on the disk (fsync) when the call returns."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

_NOT_OFFERED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of fsync on file systems without it; mostly for folders (FUSE, SMB and some others)."""


def write_durably(file: Path, text: str) -> None:
    """Replaces a text file atomically; it is on the disk when this returns, but for its folder's entry.

    One process at a time may write the same file. Where it fails, the file is as it was.
    """
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            sync(stream.fileno())
        temporary.replace(file)
    except BaseException:
        # A part of it would fill the disk further.
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sync(descriptor: int) -> bool:
    """fsync of an open file or folder. False where the file system does not offer it; raises other OSErrors."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno in _NOT_OFFERED:
            return False
        raise
    return True


def sync_folder(folder: Path) -> bool:
    """fsync of a folder's entries. False where the file system does not offer it; raises other OSErrors."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return sync(descriptor)
    finally:
        os.close(descriptor)


def missing_durability(folder: Path) -> str | None:
    """One line that says whether fsync of files or folders is missing, tried with a file in `folder`; None if neither.

    Raises OSError where the folder cannot be written.
    """
    probe = folder / f".{os.getpid()}.sync"
    try:
        with probe.open("w", encoding="utf-8") as stream:
            syncs_files = sync(stream.fileno())
    finally:
        probe.unlink(missing_ok=True)
    if syncs_files and sync_folder(folder):
        return None
    what = "the names in a folder" if syncs_files else "files"
    return (
        f"{folder} lies on a file system that does not bring {what} to the disk when asked (fsync): after a power cut "
        "the newest files there may be missing or damaged, which is found when they are read"
    )
