"""A copy of this rank's pieces in host memory, which a thread can write while training continues."""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false
from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from distiller.checkpoint.format import StoredFile, StoredKind, piece_key
from distiller.storage.durable_writes import sync
from distiller.storage.weight_files import DTYPES
from distiller.student_state.base import Piece

BUFFER_BYTES = 256 * 2**20
"""A power of two, to which torch's page-locked allocator rounds sizes up."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@final
@dataclass(frozen=True)
class SnapshotEntry:
    """A piece in a snapshot: `count` elements, whose bytes begin at byte `first_byte` of the snapshot."""

    key: str
    dtype: torch.dtype
    count: int
    first_byte: int


@final
class Snapshot:
    """Host buffers that are allocated once and reused; page-locked where there is a GPU, which copies faster then.

    Where the system locks no more pages (`ulimit -l`, a container's limit), the rest is pageable, and stderr says so.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._device, self.buffer_bytes = device, buffer_bytes
        self._locks_pages = device.type == "cuda"
        self._buffers: list[Tensor] = []
        self.entries: list[SnapshotEntry] = []
        self.num_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Host memory of the buffers."""
        return len(self._buffers) * self.buffer_bytes

    def reserve(self, num_bytes: int) -> None:
        """Allocates for this many bytes now, since page-locking some GiB takes a second."""
        while self.held_bytes < num_bytes:
            self._buffers.append(self._allocate())

    def take(self, pieces: Iterable[tuple[StoredKind, Piece]]) -> None:
        """Replaces the content by copies of these pieces; returns when they are in host memory."""
        self.entries, self.num_bytes = [], 0
        for kind, piece in pieces:
            values = piece.values.detach()
            key = piece_key(kind, piece.name, piece.start)
            self.entries.append(SnapshotEntry(key, values.dtype, values.numel(), self.num_bytes))
            self._copy(values.contiguous().view(torch.uint8))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def parts(self) -> Iterator[Tensor]:
        """All bytes in order, buffer by buffer: 1-D uint8 views of at most `buffer_bytes`."""
        for i, buffer in enumerate(self._buffers):
            count = min(self.buffer_bytes, self.num_bytes - i * self.buffer_bytes)
            if count > 0:
                yield buffer[:count]

    def write(self, file: Path) -> StoredFile:
        """Writes a safetensors file; it is on the disk when this returns, but for its folder's entry."""
        digest, size = hashlib.sha256(), 0
        with file.open("wb", buffering=0) as stream:
            for part in (self._header(), *(memoryview(part.numpy()) for part in self.parts())):
                digest.update(part)
                size += len(part)
                view = memoryview(part)
                while view:
                    view = view[stream.write(view) :]
            sync(stream.fileno())
        return StoredFile(size, digest.hexdigest())

    def _allocate(self) -> Tensor:
        if self._locks_pages:
            try:
                return _page_locked(self.buffer_bytes)
            except RuntimeError as error:
                self._locks_pages = False
                reason = str(error).splitlines()[0]
                print(
                    f"note: no page-locked memory for checkpoints ({reason}); pageable memory is used, and a save "
                    "stops the loop for longer",
                    file=sys.stderr,
                    flush=True,
                )
        return torch.empty(self.buffer_bytes, dtype=torch.uint8)

    def _copy(self, values: Tensor) -> None:
        """Appends bytes; a piece may begin in one buffer and end in a later one."""
        done = 0
        while done < len(values):
            self.reserve(self.num_bytes + 1)
            i, offset = divmod(self.num_bytes, self.buffer_bytes)
            count = min(len(values) - done, self.buffer_bytes - offset)
            target = self._buffers[i][offset : offset + count]
            target.copy_(values[done : done + count], non_blocking=True)
            done, self.num_bytes = done + count, self.num_bytes + count

    def _header(self) -> bytes:
        header = {
            entry.key: {
                "dtype": _NAMES[entry.dtype],
                "shape": [entry.count],
                "data_offsets": [entry.first_byte, entry.first_byte + entry.count * entry.dtype.itemsize],
            }
            for entry in self.entries
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def _page_locked(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
