"""What each placement takes of memory, by arithmetic from the teacher's layout, before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distiller.distributed.free_memory import free_gpu_bytes, free_host_bytes
from distiller.teachers.base import Network, Setup
from distiller.teachers.weights.layout import REST, lay_out

AUTO_SHARE = 0.8
"""Of free memory that `auto` and advice give to teacher and student; the rest is for activations."""


@dataclass(frozen=True)
class Sizes:
    """A teacher's bytes in its dtype: in all, of its largest module, of its largest block, outside of blocks."""

    total: int
    largest_module: int
    largest_block: int
    rest: int
    num_blocks: int

    def scaled(self, factor: float) -> Sizes:
        """The same teacher in numbers of another width."""
        sizes = (self.total, self.largest_module, self.largest_block, self.rest)
        return Sizes(*(int(size * factor) for size in sizes), num_blocks=self.num_blocks)


@dataclass(frozen=True)
class Footprint:
    """Bytes that a placement takes on the fullest GPU, and of the node's host memory."""

    gpu: int
    host: int


@dataclass(frozen=True)
class MemoryBudget:
    """Free bytes for the teacher: on the GPU with least of them (None on a machine without), and in host memory.

    Both are what the student leaves: its state is on the GPU, or in host memory without one or where it is offloaded.

    Attributes:
        gpu, host: as above; `gpu` is never negative, so that what takes nothing of a GPU always fits there.
        num_ranks: of this node.
        num_gpus: of this node; 0 without any.
        gpu_of_ranks: the same as `gpu`, of every rank's own GPU.
    """

    gpu: int | None
    host: int
    num_ranks: int
    num_gpus: int
    gpu_of_ranks: tuple[int, ...] = ()


def measure(network: Network, dtype: torch.dtype) -> Sizes:
    """Sizes from the modules' skeletons."""
    modules = [lay_out(network.skeleton(name, dtype), network.block_names(name)) for name in network.module_names]
    blocks = [unit.num_bytes for units in modules for unit in units if unit.name != REST]
    of_modules = [sum(unit.num_bytes for unit in units) for units in modules]
    return Sizes(sum(of_modules), max(of_modules), max(blocks, default=0), sum(of_modules) - sum(blocks), len(blocks))


def footprints(sizes: Sizes, setup: Setup, room: MemoryBudget) -> dict[str, Footprint]:
    """Every placement's needs on this node with this recipe's options."""
    options, ranks, gpus = setup.options, room.num_ranks, max(room.num_gpus, 1)
    stays = 0 if options.resident_blocks == "auto" else min(options.resident_blocks, sizes.num_blocks)
    passing = sizes.total - sizes.rest - stays * sizes.largest_block
    slots = min(options.ring_blocks, sizes.num_blocks - stays)
    ring = sizes.rest + (stays + slots) * sizes.largest_block
    total, shard = sizes.total, sizes.total // setup.ranks.world_size + sizes.rest + 2 * sizes.largest_block
    needs = {
        "replicated": Footprint(total, 0),
        "cpu": Footprint(0, total),
        "streamed": Footprint(ring, passing),
        "disk": Footprint(ring, 2 * sizes.largest_block * ranks),
        "balanced": Footprint(total // gpus + sizes.largest_block, 0),
        "sequential": Footprint(total // gpus, 0),
        "rank0": Footprint(total, 0),
        "sharded": Footprint(shard, 0),
        "swap": Footprint(sizes.largest_module, total * ranks),
    }
    if options.offload != "none":
        held = total * ranks // setup.ranks.world_size if options.offload == "cpu" else 0
        needs["sharded"] = Footprint(2 * sizes.largest_block + sizes.rest, held)
    if room.gpu is None:
        return {name: Footprint(0, _on_cpu(name, need, sizes, ranks)) for name, need in needs.items()}
    return needs


def memory_budget(setup: Setup, share: float = 1.0) -> MemoryBudget:
    """What the student leaves of a share of the memory that is free now. Communicates: all ranks get the same.

    Without GPUs the share is of host memory; with them, host memory is counted whole, since no activations lie there.
    """
    device, ranks = setup.ranks.device, setup.ranks
    gpu, num_gpus = None, 0
    reserved_host = setup.reserved_host_bytes * ranks.local_world_size
    if device.type == "cuda":
        gpu, num_gpus = max(int(free_gpu_bytes(device) * share) - setup.reserved_bytes, 0), torch.cuda.device_count()
        host = free_host_bytes() - reserved_host
    else:
        host = int(free_host_bytes() * share) - reserved_host - setup.reserved_bytes * ranks.local_world_size
    found = ranks.gather((gpu, host))
    of_ranks = tuple(one for one, _ in found if one is not None)
    return MemoryBudget(
        min(of_ranks, default=None), min(one for _, one in found), ranks.local_world_size, num_gpus, of_ranks
    )


def _on_cpu(name: str, need: Footprint, sizes: Sizes, ranks: int) -> int:
    """Without GPUs everything is host memory: what would lie on GPUs lies there once a rank, or once if shared."""
    if name in ("balanced", "sequential", "rank0", "cpu"):
        return sizes.total
    if name == "sharded":
        return sizes.total + 2 * sizes.largest_block * ranks
    return need.gpu * ranks + (need.host if name in ("streamed", "swap") else 0)
