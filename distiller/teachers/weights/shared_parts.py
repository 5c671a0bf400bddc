"""Runs of bytes that a node holds once, on its GPUs and in its host memory, filled from files by its first rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from distiller.distributed.ranks import Ranks
from distiller.storage.weight_files import WeightFiles
from distiller.teachers.device_map.module_partition import TensorGroup
from distiller.teachers.weights.gpu_copy import GpuCopy
from distiller.teachers.weights.host_copy import HostCopy
from distiller.teachers.weights.loading import fill


@dataclass(frozen=True)
class _Spot:
    """Where a part lies: from a byte of a GPU's run on, or as a numbered piece of host memory."""

    gpu: int | None
    start: int
    size: int


class SharedParts:
    """The bytes of parts, by their place in the list, seen by every rank of the node.

    A part at a number lies on that GPU, one at `cpu` in host memory; without GPUs all lie in host memory.
    """

    def __init__(self, spots: Sequence[_Spot], gpus: GpuCopy | None, host: HostCopy | None) -> None:
        """Use `make`."""
        self._spots, self._gpus, self._host = spots, gpus, host

    @staticmethod
    def make(
        parts: Sequence[TensorGroup], files: Mapping[str, WeightFiles], ranks: Ranks, page_lock: bool
    ) -> SharedParts:
        """Allocates, maps and fills. Communicates; returns when all of it is there.

        Args:
            parts: the same on all ranks of the node.
            files: of each module, on the node's first rank.
            page_lock: whether host memory is to be page-locked for the GPUs, where there are some.

        Raises UserError where there is too little host memory, or memory cannot be shared or page-locked.
        """
        has_gpus, spots, gpu_sizes, host_sizes = ranks.device.type == "cuda", [], {}, []
        for part in parts:
            size = part.stored.num_bytes
            if has_gpus and isinstance(part.location, int):
                start = gpu_sizes.get(part.location, 0)
                spots.append(_Spot(part.location, start, size))
                gpu_sizes[part.location] = start + size
            else:
                spots.append(_Spot(None, len(host_sizes), size))
                host_sizes.append(size)
        host = HostCopy.make(host_sizes, ranks) if host_sizes else None
        gpus = GpuCopy.make(gpu_sizes, ranks) if gpu_sizes else None
        shared = SharedParts(spots, gpus, host)
        ranks.all_succeed(lambda: shared._fill(parts, files) if ranks.is_local_main else None)
        if host is not None and has_gpus and page_lock:
            ranks.all_succeed(host.page_lock)
        return shared

    def piece(self, number: int) -> Tensor:
        """A part's bytes: uint8, on its GPU or in host memory, shared."""
        spot = self._spots[number]
        if spot.gpu is None:
            assert self._host is not None
            return self._host.piece(spot.start)
        assert self._gpus is not None
        return self._gpus.buffer(spot.gpu)[spot.start : spot.start + spot.size]

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, once for the node."""
        return 0 if self._host is None else self._host.num_bytes

    @property
    def gpu_bytes(self) -> dict[int, int]:
        """Bytes on each GPU, by its number."""
        return {} if self._gpus is None else self._gpus.sizes

    def close(self) -> None:
        """Lets go of the memory; nothing may refer to it any more. Communicates where there are parts on GPUs."""
        if self._gpus is not None:
            self._gpus.close()
        if self._host is not None:
            self._host.close()
        self._gpus = self._host = None

    def _fill(self, parts: Sequence[TensorGroup], files: Mapping[str, WeightFiles]) -> None:
        sources = [(part.stored, files[part.module_name]) for part in parts]
        fill(sources, [self.piece(number) for number in range(len(parts))])
        if self._gpus is not None:
            self._gpus.wait()
