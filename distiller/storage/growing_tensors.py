"""Tensors that grow row by row in files, for data that may not fit into memory before it is saved."""

from __future__ import annotations

from io import BufferedWriter
from pathlib import Path
from typing import final

import torch
from torch import Tensor


@final
class GrowingTensors:
    """Appends rows to one file for each name, and maps the files in the end. A context manager, which removes them."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[str, BufferedWriter] = {}
        self._kinds: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._counts: dict[str, int] = {}

    def __enter__(self) -> GrowingTensors:
        return self

    def __exit__(self, *_: object) -> None:
        for name, file in self._files.items():
            file.close()
            self._path(name).unlink()

    def append(self, name: str, rows: Tensor) -> None:
        """Adds CPU rows [n, ...]; all of one name have one dtype and one shape of a row."""
        if name not in self._files:
            self._files[name] = self._path(name).open("wb")
            self._kinds[name], self._counts[name] = (rows.dtype, rows.shape[1:]), 0
        assert self._kinds[name] == (rows.dtype, rows.shape[1:]), f"{name}: {rows.dtype}, {tuple(rows.shape)}"
        self._files[name].write(rows.contiguous().view(-1).view(torch.uint8).numpy())
        self._counts[name] += len(rows)

    def mapped(self) -> dict[str, Tensor]:
        """All rows of every name, mapped from the files: valid until the context ends; no row may be added then."""
        tensors = {}
        for name, file in self._files.items():
            file.flush()
            dtype, row = self._kinds[name]
            size = self._counts[name] * row.numel()
            # An empty file cannot be mapped.
            flat = (
                torch.from_file(str(self._path(name)), size=size, dtype=dtype) if size else torch.empty(0, dtype=dtype)
            )
            tensors[name] = flat.view(self._counts[name], *row)
        return tensors

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.raw"
