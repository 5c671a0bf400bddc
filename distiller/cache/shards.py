"""One shard: the outputs of consecutive samples in a safetensors file that is complete or absent.

Tensors of the same name are concatenated along their first dimension, in which samples may differ in length:

    NAME            [sum of n_i, ...]
    offsets/NAME    [samples + 1] int64: sample i is rows offsets[i]:offsets[i + 1] of NAME
    crc32           [samples] int64, over the sample's tensors in the order of their names

Each sample has its own checksum: a checksum of the file could only be verified by reading hundreds of megabytes.
"""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false
from __future__ import annotations

import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from distiller.errors import RunError
from distiller.storage.durable_writes import sync, sync_folder
from distiller.storage.file_modes import follow_umask
from distiller.storage.weight_files import StoredTensor, read_header
from distiller.teachers.base import Outputs

OFFSETS = "offsets/"
CHECKSUMS = "crc32"
PARTIAL = ".partial"


def write_shard(file: Path, samples: Sequence[Outputs]) -> None:
    """Writes a shard durably: under a temporary name, which is replaced when the file is complete.

    Args:
        samples: the tensors of each sample, on the CPU, with at least one dimension; the same names in all samples.

    Raises:
        RunError: the disk is full, or fails.
    """
    tensors: dict[str, Tensor] = {CHECKSUMS: torch.tensor([checksum(sample) for sample in samples])}
    for name in samples[0]:
        tensors[name] = torch.cat([sample[name] for sample in samples]).contiguous()
        lengths = torch.tensor([0, *(len(sample[name]) for sample in samples)])
        tensors[f"{OFFSETS}{name}"] = lengths.cumsum(0)
    partial = file.with_name(f".{file.name}{PARTIAL}")
    try:
        save_file(tensors, partial)
        with partial.open("rb") as stream:
            sync(stream.fileno())
        follow_umask(partial)
        partial.replace(file)
        sync_folder(file.parent)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{file} cannot be written ({' '.join(str(error).split())}); mend that, or free some of the disk: the same "
            "command goes on with the files that are there"
        ) from error


def remove_partial(folder: Path) -> None:
    """Removes incomplete files that a killed run has left, also those with safetensors' own temporary names."""
    for pattern in (f".*{PARTIAL}", ".tmp*"):
        for file in folder.glob(pattern):
            file.unlink(missing_ok=True)


@final
class Shard:
    """Reads samples from a shard's mapped memory, without copies; safe in forked processes."""

    def __init__(self, file: Path) -> None:
        """Maps the file. Raises UserError if it is not complete."""
        self._file, header = file, read_header(file)
        # A private mapping, since torch makes no tensors over memory that cannot be written.
        storage = torch.UntypedStorage.from_file(str(file), shared=False, nbytes=os.path.getsize(file))
        tensors = {name: _view(storage, stored) for name, stored in header.items()}
        # All tensors are views of the mapping, whose memory the system can reclaim.
        self._checksums = tensors.pop(CHECKSUMS).numpy()
        names = sorted(name.removeprefix(OFFSETS) for name in tensors if name.startswith(OFFSETS))
        self._columns = {name: _Column(tensors[name], tensors[f"{OFFSETS}{name}"]) for name in names}

    def __len__(self) -> int:
        return len(self._checksums)

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors that each sample has."""
        return frozenset(self._columns)

    def read(self, row: int) -> Outputs:
        """One sample's tensors, as they were written. Raises RunError if their bytes in the file have changed."""
        sample, crc = {}, 0
        for name, column in self._columns.items():
            sample[name], content = column.row(row)
            crc = zlib.crc32(content, crc)
        if crc != self._checksums[row]:
            raise RunError(
                f"{self._file} is damaged (the checksum of its row {row} is wrong); make it again with distiller cache "
                "RECIPE --repair"
            )
        return sample


@final
class _Column:
    """The tensors of one name, of all samples. Bytes and offsets are numpy arrays, since indexing tensors is slower."""

    def __init__(self, tensor: Tensor, offsets: Tensor) -> None:
        self._tensor, self._offsets = tensor, offsets.numpy()
        self._bytes = tensor.view(-1).view(torch.uint8).numpy()
        self._row_bytes = tensor.element_size() * math.prod(tensor.shape[1:])

    def row(self, row: int) -> tuple[Tensor, np.ndarray]:
        """A sample's tensor and its bytes, both in the mapping."""
        start, end = int(self._offsets[row]), int(self._offsets[row + 1])
        return self._tensor[start:end], self._bytes[start * self._row_bytes : end * self._row_bytes]


def checksum(sample: Outputs) -> int:
    """CRC-32 of a sample's bytes, in the order of its tensors' names."""
    value = 0
    for _, tensor in sorted(sample.items()):
        value = zlib.crc32(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()), value)
    return value


def _view(storage: torch.UntypedStorage, stored: StoredTensor) -> Tensor:
    """A stored tensor as a view of the mapping; a copy if it is not aligned to its dtype."""
    width = stored.dtype.itemsize
    if stored.start % width:
        # safetensors' own writer aligns tensors, but another program's header may have any length.
        part = torch.tensor([], dtype=torch.uint8).set_(storage, stored.start, (stored.num_bytes,), (1,))
        return part.clone().view(stored.dtype).view(stored.shape)
    strides = tuple(torch.empty(stored.shape, device="meta").stride())
    return torch.tensor([], dtype=stored.dtype).set_(storage, stored.start // width, tuple(stored.shape), strides)
