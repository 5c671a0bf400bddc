"""Memory that a process of the teacher and a rank both map, and how tensors lie in it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from distiller.errors import RunError
from distiller.teachers.weights.layout import ALIGNMENT


@final
class TensorSpec(NamedTuple):
    """A tensor in a buffer: where it begins, the name of its dtype, and its shape."""

    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """That it takes."""
        count = getattr(torch, self.dtype).itemsize
        for size in self.shape:
            count *= size
        return count


def lay_out(tensors: Iterable[Tensor]) -> tuple[list[TensorSpec], int]:
    """Places for tensors, one after the other, and the number of bytes in all."""
    specs, offset = [], 0
    for tensor in tensors:
        spec = TensorSpec(offset, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        specs.append(spec)
        offset += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
    return specs, offset


def grown(old_bytes: int, num_bytes: int) -> int:
    """Bytes of a new buffer that holds so many; half as many more than the old one at least: sizes may creep up."""
    return max(num_bytes, old_bytes + old_bytes // 2)


@final
class SharedBuffer:
    """Bytes on one device, made by one process and mapped by another one.

    Attributes:
        handle: what the other process opens it with; it pickles.
        num_bytes: that it holds.
    """

    def __init__(self, data: Tensor, handle: Any, descriptor: int = -1) -> None:
        """Use `make` or `open`. `descriptor`: open as long as this is, so that others can open it too."""
        self._data, self.handle, self.num_bytes, self._descriptor = data, handle, len(data), descriptor

    @staticmethod
    def make(num_bytes: int, device: torch.device) -> SharedBuffer:
        """New memory, on a GPU or of the host; freed when the processes that map it have dropped it or ended."""
        num_bytes = max(num_bytes, mmap.PAGESIZE)
        if device.type == "cuda":
            data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            return SharedBuffer(data, reductions.reduce_tensor(data))
        # Without a name: it is freed with its last mapping, however the processes end.
        descriptor = os.memfd_create("distiller-answers")
        os.ftruncate(descriptor, num_bytes)
        handle = (f"/proc/{os.getpid()}/fd/{descriptor}", num_bytes)
        return SharedBuffer(_mapped(descriptor, num_bytes), handle, descriptor)

    @staticmethod
    def open(handle: Any) -> SharedBuffer:
        """Memory of another process. Raises RunError where the system does not let this process map it."""
        try:
            if callable(handle[0]):
                rebuild, arguments = handle
                return SharedBuffer(rebuild(*arguments), handle)
            path, num_bytes = handle
            descriptor = os.open(path, os.O_RDWR)
        except (OSError, RuntimeError) as error:
            raise RunError(
                f"teacher.placement=dedicated: a rank cannot map memory of the teacher's process ({error}); unset "
                "expandable_segments, or choose another placement"
            ) from error
        try:
            return SharedBuffer(_mapped(descriptor, num_bytes), handle)
        finally:
            os.close(descriptor)

    def write(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> None:
        """Copies tensors to their places. On a GPU the current stream does; `finish_copies` waits for it."""
        for view, tensor in zip(self.views(specs), tensors, strict=True):
            view.copy_(tensor, non_blocking=True)

    def views(self, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """The tensors at these places, which share the buffer's memory."""
        return [
            self._data[spec.offset : spec.offset + spec.num_bytes].view(getattr(torch, spec.dtype)).view(spec.shape)
            for spec in specs
        ]

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def finish_copies(device: torch.device) -> None:
    """Waits until the current stream of the device has done what it was given; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _mapped(descriptor: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
