"""Copiers that fill the buffer pool with blocks: from host memory, by shares that ranks gather, or from files."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from distiller.storage.weight_files import WeightFiles
from distiller.teachers.streaming.buffer_pool import BlockBuffer, Copier
from distiller.teachers.weights.layout import Unit, read_entry

# torch 2.13 renamed `all_gather_into_tensor`, and warns about the old name.
_all_gather = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)

UnitBytes = Callable[[int], Tensor]
"""Index of a unit -> its bytes in host memory: uint8, 1-D."""


@final
class HostCopier(Copier):
    """Copies from host memory to a GPU, on a separate stream; the host does not wait."""

    def __init__(self, unit_bytes: UnitBytes, device: torch.device) -> None:
        self._unit_bytes, self._device, self._stream = unit_bytes, device, torch.cuda.Stream(device)
        self._copied: dict[int, torch.cuda.Event] = {}

    def start(self, buffer: BlockBuffer) -> None:
        source = self._unit_bytes(buffer.unit)
        assert buffer.last_use is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(buffer.last_use)
            buffer.data[: source.numel()].copy_(source, non_blocking=True)
            self._copied.setdefault(id(buffer), torch.cuda.Event()).record(self._stream)

    def wait(self, buffer: BlockBuffer) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied[id(buffer)])

    def close(self) -> None:
        self._stream.synchronize()


@final
class GatherCopier(Copier):
    """Each of the node's ranks copies its share of a unit from host memory to its GPU, and all gather the shares.

    For GPUs that cannot write to each other's memory (otherwise see `PeerCopier`), and for the CPU, where a thread does
    the work. Communicates in `start`, in a separate process group: every rank starts the same units in the same order.
    """

    def __init__(self, unit_bytes: UnitBytes, device: torch.device, group: dist.ProcessGroup) -> None:
        """`group` is of the node's ranks, for tensors on the device."""
        self._unit_bytes, self._device, self._group = unit_bytes, device, group
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1) if device.type == "cpu" else None
        # By the buffer's id; the first on the CPU alone, the second on a GPU alone.
        self._gathered: dict[int, Future[dist.Work | None]] = {}
        self._work: dict[int, dist.Work] = {}

    def start(self, buffer: BlockBuffer) -> None:
        if self._thread is not None:
            self._gathered[id(buffer)] = self._thread.submit(self._gather, buffer, buffer.unit)
            return
        assert self._stream is not None and buffer.last_use is not None
        with torch.cuda.stream(self._stream):
            # The all-gather of a unit that was never acquired may still run.
            if id(buffer) in self._work:
                self._work.pop(id(buffer)).wait()
            self._stream.wait_event(buffer.last_use)
            work = self._gather(buffer, buffer.unit)
        assert work is not None
        self._work[id(buffer)] = work

    def wait(self, buffer: BlockBuffer) -> None:
        if self._thread is not None:
            self._gathered.pop(id(buffer)).result()
        else:
            self._work.pop(id(buffer)).wait()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        else:
            for work in self._work.values():
                work.wait()
            torch.cuda.synchronize(self._device)

    def _gather(self, buffer: BlockBuffer, unit: int) -> dist.Work | None:
        """Copies this rank's share and gathers the others; does not wait on a GPU. Communicates."""
        source = self._unit_bytes(unit)
        share_bytes = source.numel() // self._num_ranks
        own = slice(self._rank * share_bytes, (self._rank + 1) * share_bytes)
        buffer.data[own].copy_(source[own], non_blocking=True)
        whole = buffer.data[: source.numel()]
        is_async = self._stream is not None
        return _all_gather(whole, buffer.data[own], group=self._group, async_op=is_async)


@final
class ThreadCopier(Copier):
    """Fills buffers on the CPU in a thread, so that copies and reads have the same order as with a GPU."""

    def __init__(self, load_unit: Callable[[int, Tensor], object], close: Callable[[], None] = lambda: None) -> None:
        """`load_unit(index, data)` writes a unit into `data` (uint8, 1-D, CPU); `close` frees what `load_unit` uses."""
        self._load_unit, self._close, self._thread = load_unit, close, ThreadPoolExecutor(1)
        self._copied: dict[int, Future[object]] = {}

    def start(self, buffer: BlockBuffer) -> None:
        self._copied[id(buffer)] = self._thread.submit(self._load_unit, buffer.unit, buffer.data)

    def wait(self, buffer: BlockBuffer) -> None:
        self._copied[id(buffer)].result()

    def close(self) -> None:
        self._thread.shutdown()
        self._close()


@final
class FileReader:
    """Reads the tensors of a unit from safetensors files, in several threads at once."""

    def __init__(self, units: Sequence[tuple[Unit, WeightFiles]], num_threads: int) -> None:
        self._units, self._threads = units, ThreadPoolExecutor(num_threads)

    def read(self, index: int, target: Tensor) -> None:
        """Reads unit `index` into CPU memory (uint8). Raises RunError when the files cannot be read."""
        unit, files = self._units[index]
        list(self._threads.map(read_entry, unit.entries, repeat(files), repeat(target)))

    def num_bytes(self, index: int) -> int:
        """Size of unit `index`."""
        return self._units[index][0].num_bytes

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()


@final
class FileCopier(Copier):
    """Copies from files to a GPU: a thread reads ahead into page-locked staging tensors, and queues the copies."""

    def __init__(self, reader: FileReader, staging: Sequence[Tensor], device: torch.device) -> None:
        """`staging` are two or more host tensors (uint8) of a pool buffer's size."""
        self._reader, self._device = reader, device
        self._stream = torch.cuda.Stream(device)
        # `torch.cuda.stream` sets the thread's former device again when it ends: without this GPU 0, on which it would
        # open a CUDA context.
        self._thread = ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(self._stream.device,))
        # Each staging tensor with the event after which it may be overwritten.
        self._staging = deque((memory, torch.cuda.Event()) for memory in staging)
        self._copied: dict[int, Future[torch.cuda.Event]] = {}

    def start(self, buffer: BlockBuffer) -> None:
        self._copied[id(buffer)] = self._thread.submit(self._read_and_copy, buffer, buffer.unit)

    def wait(self, buffer: BlockBuffer) -> None:
        # The host waits only until the file has been read; the device waits for the copy.
        torch.cuda.current_stream(self._device).wait_event(self._copied[id(buffer)].result())

    def close(self) -> None:
        self._thread.shutdown()
        self._stream.synchronize()
        self._reader.close()
        self._staging.clear()

    def _read_and_copy(self, buffer: BlockBuffer, unit: int) -> torch.cuda.Event:
        """Reads a unit into staging memory and queues its copy to the GPU; returns the event at the end of the copy."""
        assert buffer.last_use is not None
        memory, copied = self._staging.popleft()
        copied.synchronize()
        used = slice(self._reader.num_bytes(unit))
        self._reader.read(unit, memory)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(buffer.last_use)
            buffer.data[used].copy_(memory[used], non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        self._staging.append((memory, copied))
        return copied
