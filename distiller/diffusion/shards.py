"""Safetensors files of a stage that is interrupted at any moment: there and whole, or not there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_whole(tensors: Mapping[str, Tensor], file: Path, writer: str = "tmp") -> None:
    """Writes the tensors aside, then renames. `writer`: another one for each process that may write the same file."""
    temporary = file.with_name(f".{file.name}.{writer}")
    save_file(dict(tensors), temporary)
    temporary.replace(file)
