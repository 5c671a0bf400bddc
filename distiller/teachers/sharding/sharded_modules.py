"""What the two ways of sharding share: modules whose weights are spread over all ranks, and how they are filled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from distiller.distributed.ranks import Ranks
from distiller.teachers.weights.layout import Unit
from distiller.teachers.weights.loading import ModulePlan, broadcast_unit, read_to_device, staging_buffer


class Shards(ABC):
    """A network's modules, of which every rank holds its share. A forward pass gathers each block as it comes to it.

    All ranks run the same passes through the same modules in the same order.
    """

    modules: dict[str, nn.Module]

    @abstractmethod
    def settle(self, name: str) -> None:
        """After one or more passes through a module: whatever the library keeps for a backward pass is let go."""

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """All memory in which this rank holds weights now, wherever it lies; views of the same memory may repeat."""

    @abstractmethod
    def close(self) -> None:
        """Frees this rank's share."""


def units_in_turn(plan: ModulePlan, ranks: Ranks) -> Iterator[tuple[Unit, Tensor]]:
    """Each unit, and its weights whole on this rank's device (uint8). Rank 0 reads, the others receive. Communicates.

    All units pass through the same memory: what is to stay must be copied out before the next one is asked for.
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


def held_bytes(tensors: Iterator[Tensor], device_type: str) -> int:
    """Bytes of the memory behind tensors on one type of device, each run of it counted once."""
    storages = {
        (tensor.device, tensor.untyped_storage().data_ptr()): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.device.type == device_type
    }
    return sum(storages.values())
