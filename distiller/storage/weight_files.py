"""A saved module's tensors in safetensors files, read one by one, without pickle and without mapping whole files.

The format (https://github.com/huggingface/safetensors#format): eight bytes with the length of a JSON header, the header
with each tensor's dtype, shape and byte range, then the bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from distiller.errors import UserError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Rename = Callable[[str], str | None]
"""A stored tensor's name -> its name in the module; None where it belongs to another part of the same model."""
_CHUNK_BYTES = 64 * 2**20


@final
@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file; `start` is the offset of its first byte."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@final
class WeightFiles:
    """The tensors of safetensors files. The constructor reads headers, `read` reads a tensor. Thread-safe."""

    def __init__(self, files: Sequence[Path], rename: Rename | None = None) -> None:
        """Tensors get the names that `rename` makes of their stored names. UserError for an incomplete file."""
        self.tensors: dict[str, StoredTensor] = {}
        for file in files:
            found = read_header(file)
            if rename is not None:
                found = {name: tensor for stored, tensor in found.items() if (name := rename(stored)) is not None}
            if twice := sorted(self.tensors.keys() & found.keys()):
                raise UserError(f"{file}: holds {twice[0]}, and so does another file of the same model; remove one")
            self.tensors |= found
        self._descriptors = {file: os.open(file, os.O_RDONLY) for file in files}

    def read(self, name: str, target: Tensor) -> None:
        """Reads a tensor into a contiguous CPU tensor of its shape, converted to that one's dtype.

        Allocates nothing else, except a buffer of 64 MiB while a dtype is converted.
        """
        stored, flat = self.tensors[name], target.view(-1)
        descriptor, width = self._descriptors[stored.file], stored.dtype.itemsize
        if stored.dtype == target.dtype:
            read_bytes(descriptor, flat.view(torch.uint8), stored.start, stored.file)
            return
        step = _CHUNK_BYTES // width
        piece = torch.empty(min(step, flat.numel()), dtype=stored.dtype)
        for first in range(0, flat.numel(), step):
            part = piece[: min(step, flat.numel() - first)]
            read_bytes(descriptor, part.view(torch.uint8), stored.start + first * width, stored.file)
            flat[first : first + len(part)].copy_(part)

    def are_equal(self, one: str, other: str) -> bool:
        """Whether two tensors have the same shape and values. Compares pieces of 64 MiB at most."""
        first, second = self.tensors[one], self.tensors[other]
        if first.shape != second.shape:
            return False
        count = math.prod(first.shape)
        step = _CHUNK_BYTES // max(first.dtype.itemsize, second.dtype.itemsize)
        for start in range(0, count, step):
            length = min(step, count - start)
            pieces = [self._piece(stored, start, length) for stored in (first, second)]
            if not torch.equal(*(piece.to(torch.promote_types(*(p.dtype for p in pieces))) for piece in pieces)):
                return False
        return True

    def _piece(self, stored: StoredTensor, start: int, length: int) -> Tensor:
        piece = torch.empty(length, dtype=stored.dtype)
        offset = stored.start + start * stored.dtype.itemsize
        read_bytes(self._descriptors[stored.file], piece.view(torch.uint8), offset, stored.file)
        return piece

    def close(self) -> None:
        """Closes the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


def read_bytes(descriptor: int, target: Tensor, offset: int, file: Path) -> None:
    """Fills a 1-D uint8 CPU tensor from an open file; OSError where the file ends before."""
    view = target.numpy().data
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise OSError(f"{file}: ends before its tensors do")
        view, offset = view[count:], offset + count


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Tensor name -> its place in a safetensors file. UserError for an incomplete file, or a dtype not in `DTYPES`."""
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > 2**27:
                raise ValueError("its header is too long")
            header: dict[str, Any] = json.loads(stream.read(length))
        size = os.path.getsize(file)
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if (dtype := entry["dtype"]) not in DTYPES:
                raise UserError(f"{file}: {name} is of dtype {dtype}, which is not read; give a model without it")
            stored = StoredTensor(file, DTYPES[dtype], tuple(entry["shape"]), 8 + length + start)
            if stored.num_bytes != end - start or 8 + length + end > size:
                raise ValueError(f"{name} does not lie whole in it")
            tensors[name] = stored
        return tensors
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: is not a complete safetensors file ({error}); copy it again") from error
