"""Micro-batches out of a loader, whose processes' failures become one line."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from typing import Any

from torch.utils.data import DataLoader

from distiller.errors import RunError, UserError

MAX_SOCKET_BYTES = 107
"""Of a UNIX socket's path (`sun_path` has 108 on Linux, with the final zero)."""


def check_loader_sockets(num_workers: int) -> None:
    """UserError where loader processes could not hand over a batch, and the loop would wait for it for ever.

    They listen on a socket in Python's folder for temporary files, whose path is limited.
    """
    if not num_workers:
        return
    excess = len(os.fsencode(f"{get_temp_dir()}/listener-12345678")) - MAX_SOCKET_BYTES
    if excess > 0:
        folder = tempfile.gettempdir()
        raise UserError(
            f"train.num_workers is {num_workers} and the folder for temporary files, {folder}, has a path of "
            f"{len(os.fsencode(folder))} bytes, {excess} more than the sockets of loader processes allow; set TMPDIR "
            "to a shorter one, or train.num_workers to 0"
        )


def batches_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """The loader's micro-batches; RunError says what a loader process could not read, or that one was killed."""
    try:
        yield from loader
    except RunError as error:
        # Raised in a loader process, the message holds its traceback, and ends with what we said.
        raise RunError(str(error).rpartition(f"{RunError.__name__}: ")[2].strip()) from error
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise RunError(
            f"{str(error).splitlines()[0]} (a data file that shrank, or too little memory, does that)"
        ) from error
