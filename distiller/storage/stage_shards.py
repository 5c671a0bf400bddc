"""Safetensors files of a stage: complete or absent, even where the stage is interrupted while it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

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


def find_missing_shards(files: Sequence[Path]) -> list[int]:
    """The numbers of the files that are still to be made. UserError for one that is there and cannot be read.

    Called before the work begins: an unreadable one would be found by whoever reads the finished stage.
    """
    there = [file.is_file() for file in files]
    refuse_unreadable(file for file, is_there in zip(files, there, strict=True) if is_there)
    return [number for number, is_there in enumerate(there) if not is_there]
