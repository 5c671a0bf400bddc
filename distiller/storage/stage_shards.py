"""Safetensors files of a stage: complete or absent, even where the stage is interrupted while it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from distiller.errors import RunError
from distiller.storage.file_modes import follow_umask
from distiller.storage.stages import refuse_unreadable


def save_atomically(tensors: Mapping[str, Tensor], file: Path, writer: str = "tmp") -> None:
    """Writes a temporary file and renames it; with the umask's mode, so that another user's run can read it.

    `writer`: another one for each process that may write the same file.
    """
    temporary = file.with_name(f".{file.name}.{writer}")
    save_file(dict(tensors), temporary)
    follow_umask(temporary)
    temporary.replace(file)


def refuse_not_finite(tensors: Mapping[str, Tensor], what: str, first: int, advice: str) -> None:
    """Raises RunError if a row of a floating tensor is not finite: a finished stage would be reused by every later run.

    Args:
        tensors: [n, ...] each, of `what` number `first`, `first` + 1 and so on; what has other rows is left out.
        what: in the singular, for the message.
    """
    num_rows = max(len(tensor) for tensor in tensors.values())
    for tensor in tensors.values():
        if tensor.is_floating_point() and len(tensor) == num_rows:
            is_finite = torch.isfinite(tensor).flatten(1).all(1)
            if not is_finite.all():
                raise RunError(f"{what} {first + int(is_finite.long().argmin())} is not finite; {advice}")


def find_missing_shards(files: Sequence[Path]) -> list[int]:
    """The numbers of the files that are still to be made. UserError for one that is there and cannot be read.

    Called before the work begins: an unreadable one would be found by whoever reads the finished stage.
    """
    there = [file.is_file() for file in files]
    refuse_unreadable(file for file, is_there in zip(files, there, strict=True) if is_there)
    return [number for number, is_there in enumerate(there) if not is_there]
