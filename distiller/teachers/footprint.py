"""The teacher's size, the memory that each placement takes, and the free memory, before any weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from distiller.config.placements import PLACEMENTS
from distiller.config.placements.base import Footprint, MemoryBudget, Sizes, World
from distiller.distributed.free_memory import free_gpu_bytes, free_host_bytes
from distiller.teachers.base import Network, Setup
from distiller.teachers.quantization.layers import layer_class
from distiller.teachers.quantization.modules import convert_linears, float32_names, plan_quantized_modules
from distiller.teachers.weights.layout import REST, Unit, lay_out

AUTO_SHARE = 0.8
"""Share of free memory that `auto` and advice give to teacher and student; the rest is for activations."""


FILLED_SHARE = 0.93
"""Share of free memory that may be filled where it is known what an update takes. Predicted peaks lie up to 3% too low,
and the allocator and libraries hold memory that no tensor uses; how much has not been measured."""


def measure(network: Network, setup: Setup) -> Sizes:
    """The teacher's sizes in bytes, from its modules without weights, quantised as the recipe says. Communicates."""
    return _sizes([plan.units for plan in plan_quantized_modules(network, setup, is_reader=False)], setup.dtype)


def planned_sizes(network: Network, dtype: torch.dtype, quantization: str) -> Sizes:
    """The same for a machine that is not this one: no check of its devices, no communication."""
    modules = []
    for name in network.module_names:
        module = network.skeleton(name, dtype)
        if quantization != "none":
            convert_linears(module, float32_names(network, name), layer_class(quantization))
        modules.append(lay_out(module, network.block_names(name)))
    return _sizes(modules, dtype)


def _sizes(modules: Sequence[Sequence[Unit]], dtype: torch.dtype) -> Sizes:
    blocks = [unit.num_bytes for units in modules for unit in units if unit.name != REST]
    of_modules = [sum(unit.num_bytes for unit in units) for units in modules]
    return Sizes(
        total=sum(of_modules),
        largest_module=max(of_modules),
        largest_block=max(blocks, default=0),
        rest=sum(of_modules) - sum(blocks),
        num_blocks=len(blocks),
        item_bytes=dtype.itemsize,
    )


def footprints(
    sizes: Sizes, setup: Setup, budget: MemoryBudget, *, beside_update: bool = False
) -> dict[str, Footprint]:
    """Placement -> bytes that it takes on this node with the recipe's options.

    Placements whose specification has no `memory` are left out: their memory does not follow from sizes alone.
    `beside_update`: only what it takes more than an update's own bytes.
    """
    num_gpus = 0 if budget.gpu is None else max(budget.num_gpus, 1)
    world = World(setup.ranks.world_size, budget.num_ranks, num_gpus)
    needs = {}
    for spec in PLACEMENTS.values():
        if spec.memory is not None:
            needs[spec.name] = spec.memory(sizes, spec.options.of(setup.options), world)
            if beside_update and spec.leaves_gpu and num_gpus:
                more = max(needs[spec.name].gpu - setup.student_excess_bytes, 0)
                needs[spec.name] = replace(needs[spec.name], gpu=more)
    return needs


def kept_for_updates(setup: Setup, free: int, filled_share: float) -> int:
    """Bytes of a GPU with so many free that stay free of the teacher and of the student's state.

    Args:
        filled_share: of the free memory, that may be filled where it is not known what an update takes. Where it is
            known, `AUTO_SHARE` stands for a choice, which keeps what the update takes and a margin; above it is a
            question whether something can work, for which the lesser of both is kept.
    """
    share_kept = free - int(free * filled_share)
    if setup.update_bytes is None or filled_share == 1:
        return share_kept
    known = free - int(free * FILLED_SHARE) + setup.update_bytes
    return known if filled_share <= AUTO_SHARE else min(share_kept, known)


def memory_budget(setup: Setup, share: float = 1.0) -> MemoryBudget:
    """Bytes that the student leaves of a share of the memory that is free now. Communicates; the same on all ranks.

    With GPUs, `share` is of their memory, and host memory is counted whole, since it holds no activations. Without
    GPUs, `share` is of host memory. Where it is known what an update takes, a share below 1 stands for that.
    """
    device, ranks = setup.ranks.device, setup.ranks
    gpu, num_gpus = None, 0
    reserved_host = setup.reserved_host_bytes * ranks.local_world_size
    if device.type == "cuda":
        free = free_gpu_bytes(device)
        gpu = max(free - kept_for_updates(setup, free, share) - setup.reserved_bytes, 0)
        num_gpus = torch.cuda.device_count()
        host = free_host_bytes() - reserved_host
    else:
        host = int(free_host_bytes() * share) - reserved_host - setup.reserved_bytes * ranks.local_world_size
    gathered = ranks.gather((gpu, host))
    gpu_of_ranks = tuple(num_bytes for num_bytes, _ in gathered if num_bytes is not None)
    return MemoryBudget(
        min(gpu_of_ranks, default=None),
        min(num_bytes for _, num_bytes in gathered),
        ranks.local_world_size,
        num_gpus,
        gpu_of_ranks,
    )
