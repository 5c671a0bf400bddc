"""Small files and folder entries that are on the disk when a call returns, as far as the file system offers that."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_NOT_OFFERED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""What fsync says where a file system has no such thing: of folders, as a rule (FUSE, SMB and some others)."""


def write_durably(file: Path, text: str) -> None:
    """Replaces a text file atomically; it is on the disk when this returns, but for its folder's entry.

    One process at a time may write the same file.
    """
    temporary = file.with_name(f".{file.name}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        sync(stream.fileno())
    temporary.replace(file)


def sync(descriptor: int) -> bool:
    """Brings an open file or folder to the disk. False where the file system does not offer that; other OSErrors."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno in _NOT_OFFERED:
            return False
        raise
    return True


def sync_folder(folder: Path) -> bool:
    """Brings a folder's entries to the disk. False where the file system does not offer that; other OSErrors."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return sync(descriptor)
    finally:
        os.close(descriptor)


def missing_durability(folder: Path) -> str | None:
    """One line on what cannot be had of durability in a folder, tried with a file there; None if all can.

    OSError where the folder cannot be written.
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
