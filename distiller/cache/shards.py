"""One shard: the outputs of consecutive samples in a safetensors file that is complete or absent.

Each sample's tensors are laid one after the other along their first axis, so that samples may differ in length:

    NAME            [sum of n_i, ...]
    offsets/NAME    [samples + 1] int64: sample i lies in rows offsets[i] to offsets[i + 1]
    crc32           [samples] int64, over the sample's tensors in the order of their names

A checksum a sample, because a whole file of hundreds of megabytes cannot be read again for each of them.
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
    """Writes a shard durably, under a name of its own until it is whole.

    Args:
        samples: of each sample, its tensors on the CPU, with at least one axis.

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
    """Takes away what a killed run was writing, also under the names that safetensors uses meanwhile."""
    for pattern in (f".*{PARTIAL}", ".tmp*"):
        for file in folder.glob(pattern):
            file.unlink(missing_ok=True)


@final
class Shard:
    """Reads samples from a shard's mapped memory, without copies; safe in forked processes."""

    def __init__(self, file: Path) -> None:
        """Maps the file. UserError where it is not complete."""
        self._file, header = file, read_header(file)
        # Private: torch refuses tensors over memory that cannot be written.
        storage = torch.UntypedStorage.from_file(str(file), shared=False, nbytes=os.path.getsize(file))
        tensors = {name: _view(storage, stored) for name, stored in header.items()}
        # All of it stays in the mapping, which holds no memory that the system cannot take back.
        self._checksums = tensors.pop(CHECKSUMS).numpy()
        names = sorted(name.removeprefix(OFFSETS) for name in tensors if name.startswith(OFFSETS))
        self._columns = {name: _Column(tensors[name], tensors[f"{OFFSETS}{name}"]) for name in names}

    def __len__(self) -> int:
        return len(self._checksums)

    @property
    def names(self) -> frozenset[str]:
        """Of the tensors that each sample has."""
        return frozenset(self._columns)

    def read(self, row: int) -> Outputs:
        """One sample's tensors, as they were written; RunError if the file's bytes are not those any more."""
        sample, found = {}, 0
        for name, column in self._columns.items():
            sample[name], content = column.row(row)
            found = zlib.crc32(content, found)
        if found != self._checksums[row]:
            raise RunError(
                f"{self._file} is damaged (the checksum of its row {row} is wrong); make it again with distiller cache "
                "RECIPE --repair"
            )
        return sample


@final
class _Column:
    """One tensor of all samples. numpy finds the bytes: a loader has no time for several small tensors a sample."""

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
    width = stored.dtype.itemsize
    if stored.start % width:
        # The format's writers align; a header of odd length by another hand does not.
        part = torch.tensor([], dtype=torch.uint8).set_(storage, stored.start, (stored.num_bytes,), (1,))
        return part.clone().view(stored.dtype).view(stored.shape)
    strides = tuple(torch.empty(stored.shape, device="meta").stride())
    return torch.tensor([], dtype=stored.dtype).set_(storage, stored.start // width, tuple(stored.shape), strides)
