"""Iterates over a loader; a failure of its processes becomes an error of one line."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from typing import Any, Literal

from torch.utils.data import DataLoader

from distiller.errors import RunError, UserError

MAX_SOCKET_BYTES = 107
"""Longest path of a UNIX socket (`sun_path` has 108 bytes on Linux, with the final zero)."""


def excess_socket_bytes() -> int:
    """By how much the paths of loader processes' sockets are too long; not positive where they are not."""
    return len(os.fsencode(f"{get_temp_dir()}/listener-12345678")) - MAX_SOCKET_BYTES


def check_loader_sockets(num_workers: int | Literal["auto"]) -> None:
    """Raises UserError where loader processes could not send a batch, for which the loop would wait for ever.

    They listen on a socket in Python's folder for temporary files, and the length of a socket's path is limited. `auto`
    starts none there.
    """
    if num_workers in (0, "auto"):
        return
    if (excess := excess_socket_bytes()) > 0:
        folder = tempfile.gettempdir()
        raise UserError(
            f"train.num_workers is {num_workers} and the folder for temporary files, {folder}, has a path of "
            f"{len(os.fsencode(folder))} bytes, {excess} more than the sockets of loader processes allow; set TMPDIR "
            "to a shorter one, or train.num_workers to 0"
        )


def batches_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """The loader's micro-batches. Raises RunError for what a loader process cannot read, or if one was killed."""
    try:
        yield from loader
    except RunError as error:
        # From a loader process the message contains its traceback, and ends with the original message.
        raise RunError(str(error).rpartition(f"{RunError.__name__}: ")[2].strip()) from error
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise RunError(
            f"{str(error).splitlines()[0]} (a data file that shrank, or too little memory, does that; in a container "
            "also a small /dev/shm: give it --shm-size, or set train.num_workers to 0)"
        ) from error
