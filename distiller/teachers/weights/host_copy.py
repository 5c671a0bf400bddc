"""One copy of weights in host memory for all ranks of a node.

The memory is an anonymous file (memfd). It has no name, so it is freed when the processes that map it end, however they
end. Nor is it limited by the size of /dev/shm, which in a container is 64 MiB by default. Where a rank cannot open the
descriptor of another one, a named file is used instead, and unlinked as soon as all ranks have opened it.
"""

# Attributes that the libraries set at run time, which their stubs lack.
# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

import psutil
import torch
from torch import Tensor

from distiller.distributed.free_memory import free_host_bytes
from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.teachers.weights.layout import ALIGNMENT

NAME = "distiller-teacher"
SHM = Path("/dev/shm")
PAGE_BYTES = mmap.PAGESIZE


@final
class HostCopy:
    """Shared memory in pieces, mapped by every rank of the node; the node's first rank writes the weights into it."""

    def __init__(self, memory: mmap.mmap, sizes: Sequence[int], num_bytes: int) -> None:
        """Use `make`."""
        self.num_bytes = num_bytes
        self._buffer: Tensor | None = torch.frombuffer(memory, dtype=torch.uint8)
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self._sizes, self._is_page_locked = sizes, False

    @staticmethod
    def make(sizes: Sequence[int], ranks: Ranks, open_shared: Callable[..., int] | None = None) -> HostCopy:
        """Makes and maps pieces of these sizes (multiples of ALIGNMENT), without initialising them.

        Communicates between all ranks of all nodes. Raises UserError when a host has too little memory, on every rank.
        """
        assert all(size % ALIGNMENT == 0 for size in sizes)
        # A mapping cannot be empty, and only whole pages can be page-locked.
        num_bytes = max(-(-sum(sizes) // PAGE_BYTES), 1) * PAGE_BYTES

        def map_memory() -> mmap.mmap:
            ranks.broadcast_from_local_main(lambda: _check_free_memory(num_bytes))
            descriptor = (open_shared or _open_shared)(num_bytes, ranks)
            memory = mmap.mmap(descriptor, num_bytes)
            os.close(descriptor)
            return memory

        return HostCopy(ranks.all_succeed(map_memory), sizes, num_bytes)

    def piece(self, index: int) -> Tensor:
        """One piece: uint8, 1-D, shared."""
        assert self._buffer is not None
        return self._buffer[self._offsets[index] : self._offsets[index] + self._sizes[index]]

    def page_lock(self) -> None:
        """Page-locks the memory for this process, whose GPU then copies from it at the bus's full speed.

        Raises UserError when the driver refuses.
        """
        assert self._buffer is not None
        error = torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), self.num_bytes, 0)
        if int(error) != 0:
            raise UserError(
                f"{self.num_bytes / 2**30:.1f} GiB of host memory cannot be page-locked ({error}); raise the limit "
                "(`ulimit -l unlimited`), or set teacher.pin_memory=false, which is several times slower"
            )
        self._is_page_locked = True

    def close(self) -> None:
        """Unlocks and unmaps the memory, which is freed when the last rank has closed it."""
        if self._is_page_locked and self._buffer is not None:
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
            self._is_page_locked = False
        self._buffer = None

    def __del__(self) -> None:
        # After an error `close` is not called, and memory must not be unmapped while it is page-locked.
        self.close()


def _check_free_memory(num_bytes: int) -> None:
    free = free_host_bytes()
    if num_bytes > free:
        raise UserError(
            f"the teacher's host copy takes {num_bytes / 2**30:.2f} GiB and {free / 2**30:.2f} GiB of host memory are "
            "free; choose teacher.placement=disk, or teacher.dtype=bfloat16, or raise the container's memory limit"
        )


def _open_shared(num_bytes: int, ranks: Ranks) -> int:
    """A descriptor of the same anonymous or named file on every rank of the node. Communicates."""
    own = -1

    def create() -> str:
        nonlocal own
        own = os.memfd_create(NAME)
        os.ftruncate(own, num_bytes)
        return f"/proc/{os.getpid()}/fd/{own}"

    path = ranks.broadcast_from_local_main(create)
    descriptor = own
    if not ranks.is_local_main:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR)
    if all(ranks.gather_on_node(descriptor >= 0)):
        return descriptor
    if descriptor >= 0:
        os.close(descriptor)
    return open_named(num_bytes, ranks)


def open_named(num_bytes: int, ranks: Ranks, folders: Sequence[Path] | None = None) -> int:
    """As `_open_shared`, by a named file that is unlinked as soon as all ranks have opened it.

    Raises UserError, on every rank of the node, if no folder has enough space. Communicates.
    """

    def create() -> str:
        folder = _folder_with_space(num_bytes, folders or (SHM, Path(tempfile.gettempdir())))
        path = folder / f"{NAME}-{os.getpid()}-{uuid.uuid4().hex}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(descriptor, num_bytes)
        os.close(descriptor)
        return os.fspath(path)

    path = ranks.broadcast_from_local_main(create)
    try:
        descriptor = os.open(path, os.O_RDWR)
    finally:
        ranks.node_barrier()
        if ranks.is_local_main:
            os.unlink(path)
    return descriptor


def _folder_with_space(num_bytes: int, folders: Sequence[Path]) -> Path:
    for folder in folders:
        _remove_stale(folder)
    for folder in folders:
        if folder.is_dir() and shutil.disk_usage(folder).free > num_bytes:
            return folder
    names = " and ".join(f"{folder} ({shutil.disk_usage(folder).free / 2**30:.2f} GiB free)" for folder in folders)
    raise UserError(
        f"the teacher's shared host copy takes {num_bytes / 2**30:.2f} GiB, more than {names}; raise the container's "
        "shared memory (docker run --shm-size), point TMPDIR at a larger disk, or choose teacher.placement=disk"
    )


def _remove_stale(folder: Path) -> None:
    """Removes files whose process was killed after it created and before it unlinked them."""
    for file in folder.glob(f"{NAME}-*-*"):
        pid = file.name.removeprefix(f"{NAME}-").partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            with suppress(OSError):
                file.unlink()
