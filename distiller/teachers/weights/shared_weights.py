"""Tensor groups that a node holds once, on GPUs and in host memory, loaded from files by the node's first rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from distiller.distributed.ranks import Ranks
from distiller.storage.weight_files import WeightFiles
from distiller.teachers.device_map.module_partition import TensorGroup
from distiller.teachers.weights.gpu_copy import GpuCopy
from distiller.teachers.weights.host_copy import HostCopy
from distiller.teachers.weights.loading import load_units


@final
@dataclass(frozen=True)
class _GpuRange:
    gpu: int
    start: int
    num_bytes: int


@final
@dataclass(frozen=True)
class _HostPiece:
    index: int


@final
class SharedWeights:
    """The bytes of tensor groups, by their index in `groups`, shared by every rank of the node.

    A group whose location is a number is on that GPU; one at `cpu` is in host memory. Without GPUs all groups are in
    host memory.
    """

    def __init__(
        self, allocations: Sequence[_GpuRange | _HostPiece], gpus: GpuCopy | None, host: HostCopy | None
    ) -> None:
        """Use `make`."""
        self._allocations, self._gpus, self._host = allocations, gpus, host

    @staticmethod
    def make(
        groups: Sequence[TensorGroup], files: Mapping[str, WeightFiles], ranks: Ranks, page_lock: bool
    ) -> SharedWeights:
        """Allocates and maps the memory, and loads the weights. Communicates; returns when all weights are loaded.

        Args:
            groups: the same on all ranks of the node.
            files: of each module, on the node's first rank.
            page_lock: whether host memory is page-locked for the GPUs, where there are GPUs.

        Raises:
            UserError: there is too little host memory, or memory cannot be shared or page-locked.
        """
        has_gpus = ranks.device.type == "cuda"
        allocations: list[_GpuRange | _HostPiece] = []
        gpu_sizes: dict[int, int] = {}
        host_sizes: list[int] = []
        for group in groups:
            num_bytes = group.stored.num_bytes
            if has_gpus and isinstance(group.location, int):
                start = gpu_sizes.get(group.location, 0)
                allocations.append(_GpuRange(group.location, start, num_bytes))
                gpu_sizes[group.location] = start + num_bytes
            else:
                allocations.append(_HostPiece(len(host_sizes)))
                host_sizes.append(num_bytes)
        # Nodes with other free memory have other maps, and all of them communicate in the same calls.
        any_on_hosts, any_on_gpus = (
            any(used) for used in zip(*ranks.gather((bool(host_sizes), bool(gpu_sizes))), strict=True)
        )
        host = HostCopy.make(host_sizes, ranks) if any_on_hosts else None
        gpus = GpuCopy.make(gpu_sizes, ranks) if any_on_gpus else None
        shared = SharedWeights(allocations, gpus, host)
        ranks.all_succeed(lambda: shared._load(groups, files) if ranks.is_local_main else None)
        if host is not None and has_gpus and page_lock:
            ranks.all_succeed(host.page_lock)
        return shared

    def group_bytes(self, index: int) -> Tensor:
        """A group's bytes: uint8, 1-D, on its GPU or in host memory, shared."""
        allocation = self._allocations[index]
        if isinstance(allocation, _HostPiece):
            assert self._host is not None
            return self._host.piece(allocation.index)
        assert self._gpus is not None
        start = allocation.start
        return self._gpus.buffer(allocation.gpu)[start : start + allocation.num_bytes]

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, once for the node."""
        return 0 if self._host is None else self._host.num_bytes

    @property
    def gpu_bytes(self) -> dict[int, int]:
        """GPU number -> bytes on it."""
        return {} if self._gpus is None else self._gpus.sizes

    def close(self) -> None:
        """Frees the memory, which no tensor may refer to any more. Communicates if there are groups on GPUs."""
        if self._gpus is not None:
            self._gpus.close()
        if self._host is not None:
            self._host.close()
        self._gpus = self._host = None

    def _load(self, groups: Sequence[TensorGroup], files: Mapping[str, WeightFiles]) -> None:
        sources = [(group.stored, files[group.module_name]) for group in groups]
        load_units(sources, [self.group_bytes(i) for i in range(len(groups))])
        if self._gpus is not None:
            self._gpus.wait()
