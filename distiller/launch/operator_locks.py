"""Removes locks that killed runs left on the operators that DeepSpeed builds at first use.

torch guards a build, and each later load, by the presence of a file `lock`
(https://github.com/pytorch/pytorch/blob/main/torch/utils/file_baton.py): after a SIGKILL the file stays, and every
later run waits for it without a message. Its owner keeps it open, so a lock that no process has open has no owner.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

from distiller.errors import UserError

# The owner may be on another machine that shares the folder, where it cannot be seen: its build gets this long.
PATIENCE_S = 120


def extension_folder() -> Path:
    """The folder in which torch builds operators."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()).resolve()


def clear_operator_locks(folder: Path, patience_s: float = PATIENCE_S) -> None:
    """Removes the locks in the folder that have no owner; prints a line for each.

    Every rank may call it at once: nothing is removed that another rank has made since.

    Args:
        folder: as of `extension_folder`.
        patience_s: seconds; a younger lock that no process of this machine has open is waited for.

    Raises:
        UserError: such a lock cannot be removed.
    """
    while locks := [lock for lock in _locks(folder) if not _is_open(lock)]:
        for lock in locks:
            _wait(lock, patience_s)
        try:
            # One process of this machine at a time checks and removes.
            with (folder / ".distiller").open("w") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX)
                for lock in locks:
                    if _age_s(lock) > patience_s and not _is_open(lock):
                        lock.unlink(missing_ok=True)
                        print(f"note: removed {lock}, which a killed run left while it loaded {lock.parent.name}")
        except OSError as error:
            raise UserError(
                f"{locks[0]} was left by a run that was killed, torch would wait for it for ever, and it cannot be "
                f"removed ({error.strerror}); set TORCH_EXTENSIONS_DIR to a folder of your own"
            ) from error


def _locks(folder: Path) -> list[Path]:
    # With TORCH_EXTENSIONS_DIR there is no folder of the Python version between.
    return [*folder.glob("*/lock"), *folder.glob("*/*/lock")]


def _wait(lock: Path, patience_s: float) -> None:
    left_s = patience_s - _age_s(lock)
    if left_s > 0 and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"note: waiting up to {left_s:.0f} s for {lock}, which no process of this machine holds", flush=True)
    while lock.exists() and not _is_open(lock) and _age_s(lock) <= patience_s:
        time.sleep(0.2)


def _age_s(lock: Path) -> float:
    try:
        return time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_open(lock: Path) -> bool:
    """Whether a process of this machine has it open; of other users' processes that cannot be read."""
    for entry in Path("/proc").glob("[0-9]*/fd"):
        try:
            for descriptor in entry.iterdir():
                if os.readlink(descriptor) == str(lock):
                    return True
        except OSError:
            # The process has ended, or is another user's, who would have a folder of their own.
            continue
    return False
