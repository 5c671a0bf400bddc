"""Which placements fit into the memory that is free: one account for `auto`, for refusals and for their advice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache

from distiller.config.teacher import Teacher
from distiller.errors import UserError
from distiller.teachers.base import Network, Setup
from distiller.teachers.device_map.maps import Packing, balanced_map, budgets_of_devices, sequential_map
from distiller.teachers.device_map.module_partition import separate_shared_names
from distiller.teachers.device_map.teacher import MakeMap, pack
from distiller.teachers.footprint import AUTO_SHARE, Footprint, MemoryBudget
from distiller.teachers.weights.loading import ModulePlan
from distiller.teachers.weights.quantized import plan_quantized_modules

GIB = 2**30

ON_GPUS = ("replicated", "streamed", "sharded", "balanced", "rank0", "sequential", "swap", "disk", "cpu")
"""Fastest first, as docs/MODEL_LOADING_STRATEGIES.md measured them on two GPUs at 6,240 tokens."""

ONE_RANK = ("replicated", "balanced", "sequential", "streamed", "sharded", "rank0", "swap", "disk", "cpu")
"""The same for a single process: nobody waits for it on the GPUs that a device map spreads the teacher over."""

ON_CPUS = ("replicated", "balanced", "cpu", "sequential", "sharded", "rank0", "streamed", "swap", "disk")
"""Fastest first where ranks stand for GPUs: all of them compute on the same cores, so what copies least comes first."""

DEVICE_MAPS = ("balanced", "sequential", "custom")

AUTO = ("replicated", "streamed", "balanced", "cpu", "disk")
"""What `auto` chooses from."""

PackDevices = Callable[[str, float], Packing]
"""(placement, share of each GPU that stays free) -> the placement's device maps on the node's GPUs."""


def device_packing(network: Network, setup: Setup) -> PackDevices:
    """How device maps would place the teacher on this node's GPUs. The returned call communicates; reads no weights."""
    custom = dict(setup.options.device_map or {})
    maps: dict[str, MakeMap] = {
        "balanced": balanced_map,
        "sequential": sequential_map,
        "custom": lambda *_: custom,
    }

    @cache
    def skeletons() -> tuple[list[ModulePlan], list[int]]:
        plans = plan_quantized_modules(network, setup, is_reader=False)
        for plan in plans:
            separate_shared_names(plan)
        return plans, setup.ranks.gather_on_node(setup.ranks.device.index or 0)

    def look(placement: str, kept_share: float) -> Packing:
        plans, gpus_of_ranks = skeletons()

        def on_node() -> Packing:
            room = budgets_of_devices(setup.ranks, setup.reserved_bytes, gpus_of_ranks, kept_share)
            packing = pack(plans, maps[placement], room, placement == "custom" and "disk" in custom.values())
            return replace(packing, maps=[])

        # One rank of the node looks: free memory changes while others do. The worst of the nodes counts.
        packings = setup.ranks.gather(setup.ranks.broadcast_from_local_main(on_node))
        return next((packing for packing in packings if not packing.fits), packings[0])

    return look


def fitting(
    needs: Mapping[str, Footprint],
    room: MemoryBudget,
    options: Teacher,
    pack_devices: PackDevices | None,
    kept_share: float,
) -> Iterator[str]:
    """The placements that fit, fastest first, each looked for when it is asked for.

    Communicates where `pack_devices` is given: a device map opens a context on every GPU of the node, which takes
    memory there, so it is not made where something faster fits.

    Args:
        needs: of the placements that may run here.
        room: what is left of the GPUs when `kept_share` of their free memory is kept for activations.
        pack_devices: how device maps would fill this node's GPUs; None on a machine without.
    """

    def fits(name: str) -> bool:
        if name not in needs:
            return False
        if pack_devices is not None and name in DEVICE_MAPS:
            return pack_devices(name, kept_share).fits
        free = room.gpu_of_ranks[options.rank] if name == "rank0" and room.gpu_of_ranks else room.gpu
        return needs[name].host <= room.host and (free is None or needs[name].gpu <= free)

    order = ON_CPUS if room.gpu is None else ONE_RANK if room.num_ranks == 1 else ON_GPUS
    return (name for name in order if fits(name))


def check_fits(
    options: Teacher, needs: Mapping[str, Footprint], room: MemoryBudget, others: Callable[[], Iterable[str]]
) -> None:
    """Raises UserError when the placement takes more than there is, naming those that do fit.

    Args:
        room: all that the student leaves, with nothing kept for activations: a refusal is certain.
        others: called for the placements that fit.
    """
    name = options.placement
    if name not in needs:
        return
    if name == "rank0" and room.gpu_of_ranks:
        room = replace(room, gpu=room.gpu_of_ranks[options.rank])
    where, need, free = "of host memory", needs[name].host, room.host
    if room.gpu is not None and needs[name].gpu > room.gpu:
        where, need, free = "on a GPU", needs[name].gpu, room.gpu
    if need > free:
        raise UserError(
            f"teacher.placement {name} takes {need / GIB:.2f} GiB {where} and the student leaves "
            f"{max(free, 0) / GIB:.2f} GiB; {advice(other for other in others() if other != name)}"
        )


def advice(names: Iterable[str]) -> str:
    """What to choose instead."""
    if listed := ", ".join(names):
        return f"these fit, fastest first: {listed}"
    return "no placement fits, so choose a smaller teacher.dtype or a smaller student"


def choose(
    whole: Footprint, room: MemoryBudget, fits: Callable[[bool], Iterable[str]], reserved: int
) -> tuple[str, str]:
    """`auto`: the placement, and why, in one line.

    Args:
        whole: what `replicated` takes.
        room: what is left of `AUTO_SHARE` of the free memory.
        fits: the placements that fit, fastest first: with room for activations (True), or without (False).
        reserved: bytes of the student's state, on each GPU or on the host.
    """
    students = reserved * (room.num_ranks if room.gpu is None else 1)
    taken, free = (whole.host, room.host) if room.gpu is None else (whole.gpu, room.gpu)
    place = "host memory" if room.gpu is None else "the GPU with least"
    reason = (
        f"a whole teacher and the student take {(taken + students) / GIB:.2f} GiB of the {(free + students) / GIB:.2f} "
        f"that are {AUTO_SHARE:.0%} of what {place} has free"
    )
    candidates = (name for with_activations in (True, False) for name in fits(with_activations) if name in AUTO)
    # Where nothing fits, `replicated` is refused with that advice.
    return next(candidates, "replicated"), reason
