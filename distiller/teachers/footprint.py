"""What each placement takes of memory, by arithmetic from the teacher's layout, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from distiller.errors import UserError
from distiller.room import free_gpu_bytes, free_host_bytes
from distiller.teacher_config import Teacher
from distiller.teachers.base import Network, Setup
from distiller.teachers.layout import REST, lay_out

GIB = 2**30
DEVICE_MAPS = ("balanced", "sequential", "custom")
AUTO_SHARE = 0.8
"""Of free memory that `auto` gives to teacher and student before it spreads the teacher."""


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
class Room:
    """Bytes to have: on the GPU with least (None on a machine without), in the node's host memory; and where to put it.

    Both are what the student leaves: its state is on the GPU, or in host memory without one or where it is offloaded.
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


def footprints(sizes: Sizes, setup: Setup, room: Room) -> dict[str, Footprint]:
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


def room_of(setup: Setup) -> Room:
    """What there is, on the GPU with least of it. Communicates: all ranks get the same."""
    device, ranks = setup.ranks.device, setup.ranks
    gpu, num_gpus = None, 0
    host = free_host_bytes() - setup.reserved_host_bytes * ranks.local_world_size
    if device.type == "cuda":
        gpu, num_gpus = max(free_gpu_bytes(device) - setup.reserved_bytes, 0), torch.cuda.device_count()
    else:
        host -= setup.reserved_bytes * ranks.local_world_size
    found = ranks.gather((gpu, host))
    of_ranks = tuple(one for one, _ in found if one is not None)
    return Room(min(of_ranks, default=None), min(one for _, one in found), ranks.local_world_size, num_gpus, of_ranks)


def check_fits(options: Teacher, needs: Mapping[str, Footprint], room: Room) -> None:
    """Raises UserError when the placement does not fit, naming those that do.

    Device maps look at each GPU themselves, before weights are read; `rank0` needs room on one GPU alone.
    """
    name = options.placement
    if name == "rank0" and room.gpu_of_ranks:
        room = replace(room, gpu=room.gpu_of_ranks[options.rank])
    if name not in needs or (name in DEVICE_MAPS and room.gpu is not None) or _fits(needs[name], room):
        return
    others = [other for other, need in needs.items() if other != name and _fits(need, room)]
    where, need, free = "of host memory", needs[name].host, room.host
    if room.gpu is not None and needs[name].gpu > room.gpu:
        where, need, free = "on a GPU", needs[name].gpu, room.gpu
    raise UserError(
        f"teacher.placement {name} takes {need / GIB:.2f} GiB {where} and the student leaves "
        f"{max(free, 0) / GIB:.2f} GiB; these fit: {', '.join(others) or 'none, choose a smaller teacher.dtype'}"
    )


def choose(needs: Mapping[str, Footprint], room: Room, student_bytes: int) -> tuple[str, str]:
    """`auto`: the placement, and why, in one line. `needs` are those of the placements that may run here."""
    whole, count = needs["replicated"], room.num_gpus if room.gpu is not None else room.num_ranks
    taken, free = (whole.host, room.host) if room.gpu is None else (whole.gpu, room.gpu)
    students = student_bytes * (room.num_ranks if room.gpu is None else 1)
    taken, free = taken + students, free + students
    share = f"teacher and student take {taken / GIB:.2f} of {free / GIB:.2f} GiB free"
    if taken < AUTO_SHARE * free:
        return "replicated", f"{share}, less than {AUTO_SHARE:.0%}"
    order = ("balanced", "cpu", "streamed", "disk")[0 if count > 1 else 1 :]
    candidates = [name for name in order if name in needs and _fits(needs[name], room)]
    devices = f"{count} devices" if count > 1 else "one device"
    name = candidates[0] if candidates else "replicated"
    return name, f"{share}, {AUTO_SHARE:.0%} or more; {devices}"


def _fits(need: Footprint, room: Room) -> bool:
    return need.host <= room.host and (room.gpu is None or need.gpu <= room.gpu)


def _on_cpu(name: str, need: Footprint, sizes: Sizes, ranks: int) -> int:
    """Without GPUs everything is host memory: what would lie on GPUs lies there once a rank, or once if shared."""
    if name in ("balanced", "sequential", "rank0", "cpu"):
        return sizes.total
    if name == "sharded":
        return sizes.total + 2 * sizes.largest_block * ranks
    return need.gpu * ranks + (need.host if name in ("streamed", "swap") else 0)
