"""Micro-batches out of a loader, whose processes' failures become one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from distiller.errors import RunError


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
