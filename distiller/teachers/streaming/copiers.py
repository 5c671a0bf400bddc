"""The ways in which a block gets into a slot of the ring: from host memory, shared among ranks, or from files."""

# Types here are wider than what is passed on; to be narrowed in the code.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distiller.errors import RunError
from distiller.storage.weight_files import WeightFiles
from distiller.teachers.streaming.buffer_pool import BlockBuffer, Copier
from distiller.teachers.weights.layout import Entry, Unit

# torch 2.13 gave it another name, and warns about this one.
_all_gather = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)

Pieces = Callable[[int], Tensor]
"""Unit number -> its bytes in host memory."""


class HostCopier(Copier):
    """From host memory to a GPU, on a stream of its own: nothing waits on the host."""

    def __init__(self, pieces: Pieces, device: torch.device) -> None:
        self._pieces, self._device, self._stream = pieces, device, torch.cuda.Stream(device)
        self._ready: dict[int, torch.cuda.Event] = {}

    def start(self, slot: BlockBuffer) -> None:
        piece = self._pieces(slot.unit)
        assert slot.used is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.used)
            slot.buffer[: piece.numel()].copy_(piece, non_blocking=True)
            self._ready.setdefault(id(slot), torch.cuda.Event()).record(self._stream)

    def wait(self, slot: BlockBuffer) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._ready[id(slot)])

    def close(self) -> None:
        self._stream.synchronize()


class GatherCopier(Copier):
    """Each of the node's ranks copies its share of a unit from host memory to its GPU, and all gather the shares.

    For GPUs that cannot write to each other's memory, and for the CPU, where a thread does the work; otherwise see
    `PeerFeed`. Communicates in `start`, in a group of its own: every rank starts the same units in the same order.
    """

    def __init__(self, pieces: Pieces, device: torch.device, group: dist.ProcessGroup) -> None:
        """`group` is of the node's ranks, for tensors on the device."""
        self._pieces, self._device, self._group = pieces, device, group
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1) if device.type == "cpu" else None
        self._work: dict[int, dist.Work | Future[None]] = {}

    def start(self, slot: BlockBuffer) -> None:
        if self._thread is not None:
            self._work[id(slot)] = self._thread.submit(self._gather, slot, slot.unit)
            return
        assert self._stream is not None and slot.used is not None
        with torch.cuda.stream(self._stream):
            # A unit that was brought and not used: its gathering may still run.
            if id(slot) in self._work:
                self._work.pop(id(slot)).wait()
            self._stream.wait_event(slot.used)
            self._work[id(slot)] = self._gather(slot, slot.unit)

    def wait(self, slot: BlockBuffer) -> None:
        work = self._work.pop(id(slot))
        if isinstance(work, Future):
            work.result()
        else:
            work.wait()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        else:
            for work in self._work.values():
                work.wait()
            torch.cuda.synchronize(self._device)

    def _gather(self, slot: BlockBuffer, unit: int) -> Any:
        piece = self._pieces(unit)
        share = piece.numel() // self._num_ranks
        own = slice(self._rank * share, (self._rank + 1) * share)
        slot.buffer[own].copy_(piece[own], non_blocking=True)
        whole = slot.buffer[: piece.numel()]
        is_async = self._stream is not None
        return _all_gather(whole, slot.buffer[own], group=self._group, async_op=is_async)


class ThreadCopier(Copier):
    """On the CPU, from host memory by a thread, so that the order of copies and reads is that of a GPU."""

    def __init__(self, fill: Callable[[int, Tensor], object], close: Callable[[], None] = lambda: None) -> None:
        """`fill(unit, buffer)` brings a unit into a buffer on the CPU; `close` ends what it stands on."""
        self._fill, self._close, self._thread = fill, close, ThreadPoolExecutor(1)
        self._done: dict[int, Future[object]] = {}

    def start(self, slot: BlockBuffer) -> None:
        self._done[id(slot)] = self._thread.submit(self._fill, slot.unit, slot.buffer)

    def wait(self, slot: BlockBuffer) -> None:
        self._done[id(slot)].result()

    def close(self) -> None:
        self._thread.shutdown()
        self._close()


class FileReader:
    """Reads the tensors of a unit from safetensors files by several threads at once."""

    def __init__(self, units: Sequence[tuple[Unit, WeightFiles]], num_threads: int) -> None:
        self._units, self._threads = units, ThreadPoolExecutor(num_threads)

    def fill(self, unit: int, buffer: Tensor) -> None:
        """Reads a unit into a buffer on the CPU. Raises RunError when the files cannot be read."""
        layout, files = self._units[unit]
        try:
            list(self._threads.map(_read_entry, layout.entries, repeat(files), repeat(buffer)))
        except OSError as error:
            raise RunError(f"the teacher's weights cannot be read any more ({error}); were the files moved?") from error

    def num_bytes(self, unit: int) -> int:
        """A unit's size."""
        return self._units[unit][0].num_bytes

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()


def _read_entry(entry: Entry, files: WeightFiles, buffer: Tensor) -> None:
    name = next(name for name in entry.names if name in files.tensors)
    files.read(name, entry.view(buffer))


class FileCopier(Copier):
    """From files to a GPU: a thread reads ahead into page-locked staging memory and queues the copy from there."""

    def __init__(self, reader: FileReader, staging: Sequence[Tensor], device: torch.device) -> None:
        """`staging` are two or more host buffers of a slot's size."""
        self._reader, self._device = reader, device
        self._stream, self._thread = torch.cuda.Stream(device), ThreadPoolExecutor(1)
        self._staging = deque((buffer, torch.cuda.Event()) for buffer in staging)
        self._ready: dict[int, Future[torch.cuda.Event]] = {}

    def start(self, slot: BlockBuffer) -> None:
        self._ready[id(slot)] = self._thread.submit(self._bring, slot, slot.unit)

    def wait(self, slot: BlockBuffer) -> None:
        # The host waits only until the file has been read, the device for the copy.
        torch.cuda.current_stream(self._device).wait_event(self._ready[id(slot)].result())

    def close(self) -> None:
        self._thread.shutdown()
        self._stream.synchronize()
        self._reader.close()
        self._staging.clear()

    def _bring(self, slot: BlockBuffer, unit: int) -> torch.cuda.Event:
        assert slot.used is not None
        buffer, copied = self._staging.popleft()
        copied.synchronize()
        part = slice(self._reader.num_bytes(unit))
        self._reader.fill(unit, buffer)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.used)
            slot.buffer[part].copy_(buffer[part], non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        self._staging.append((buffer, copied))
        return copied
