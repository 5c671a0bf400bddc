"""File permissions by the process's umask, also for files that a library wrote for their owner alone."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

_NOT_GRANTED = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of chmod for another user's file, and on file systems without modes (vfat, some of FUSE)."""


def follow_umask(path: Path) -> None:
    """Gives a file, or all files below a folder, the mode that `open` would have given them.

    safetensors creates its files for the owner alone, whatever the umask. Where the system refuses the change, the mode
    stays as it is, since the content is complete. Other OSErrors are raised.
    """
    mode = 0o666 & ~_umask()
    for file in (path,) if path.is_file() else path.rglob("*"):
        if file.is_file() and not file.is_symlink() and file.stat().st_mode & 0o666 != mode:
            try:
                file.chmod(mode)
            except OSError as error:
                if error.errno not in _NOT_GRANTED:
                    raise


def _umask() -> int:
    """The umask, read from /proc where possible: setting it for a moment affects files that other threads create."""
    try:
        found = re.search(r"^Umask:\s*(\d+)$", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    if found:
        return int(found[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
