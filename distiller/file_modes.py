"""The permissions of files that others may read: what the process's umask allows, whoever wrote them."""

from __future__ import annotations

import os
import re
from pathlib import Path


def follow_umask(path: Path) -> None:
    """Gives a file, or all files below a folder, the mode that `open` would have given them.

    safetensors creates its files for the owner alone, whatever the umask says. OSError where they are another user's.
    """
    mode = 0o666 & ~_umask()
    for file in (path,) if path.is_file() else path.rglob("*"):
        if file.is_file() and not file.is_symlink() and file.stat().st_mode & 0o666 != mode:
            file.chmod(mode)


def _umask() -> int:
    """Read, where Linux tells it: to set it for a moment would reach the files of other threads."""
    try:
        found = re.search(r"^Umask:\s*(\d+)$", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    if found:
        return int(found[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
