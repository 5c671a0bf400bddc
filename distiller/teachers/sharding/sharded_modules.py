"""The interface of modules that are sharded over all ranks (FSDP2 or ZeRO-3), and loading shared by both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from distiller.distributed.ranks import Ranks
from distiller.teachers.weights.layout import Unit
from distiller.teachers.weights.loading import ModulePlan, broadcast_unit, read_to_device, staging_buffer


class ShardedModules(ABC):
    """A network's modules, of which every rank holds a shard. A forward pass gathers each block before it runs.

    Forward passes communicate: all ranks run the same ones through the same modules in the same order.
    """

    modules: dict[str, nn.Module]

    @abstractmethod
    def release_forward_state(self, name: str) -> None:
        """Drops what the library keeps for a backward pass; called after one or more passes through a module."""

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """All tensors in which this rank holds weights now, on any device; several may be views of the same memory."""

    @abstractmethod
    def close(self) -> None:
        """Frees this rank's shards."""


def broadcast_units(plan: ModulePlan, ranks: Ranks) -> Iterator[tuple[Unit, Tensor]]:
    """(Unit, all its bytes on this rank's device as uint8), one by one. Rank 0 reads, the others receive. Communicates.

    All units use the same memory: copy what is needed before the next one is requested.
    """
    buffer = torch.empty(max(unit.num_bytes for unit in plan.units), dtype=torch.uint8, device=ranks.device)
    staging = staging_buffer(plan.units, ranks.device) if ranks.is_main else None
    for unit in plan.units:
        whole = buffer[: unit.num_bytes]
        if ranks.is_main:
            assert plan.files is not None
            read_to_device(plan.files, unit, whole, staging)
        broadcast_unit(whole, ranks)
        yield unit, whole
    plan.close_files()


def storage_bytes(tensors: Iterator[Tensor], device_type: str) -> int:
    """Bytes of the storages behind tensors on one type of device, each storage counted once."""
    storages = {
        (tensor.device, tensor.untyped_storage().data_ptr()): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.device.type == device_type
    }
    return sum(storages.values())
