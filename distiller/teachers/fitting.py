"""Which placements fit into the memory that is free: one account for `auto`, for refusals and for their advice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache

from distiller.config.placements import PLACEMENTS
from distiller.config.placements.base import Footprint, MemoryBudget
from distiller.config.teacher import Teacher
from distiller.errors import UserError
from distiller.teachers.base import Network, Setup
from distiller.teachers.device_map.maps import Packing, budgets_of_devices
from distiller.teachers.device_map.module_partition import separate_shared_names
from distiller.teachers.device_map.teacher import pack
from distiller.teachers.footprint import AUTO_SHARE
from distiller.teachers.weights.loading import ModulePlan
from distiller.teachers.weights.quantized import plan_quantized_modules

GIB = 2**30

PackDevices = Callable[[str, float], Packing]
"""(placement, share of each GPU that stays free) -> the placement's device maps on the node's GPUs."""


def by_speed(budget: MemoryBudget) -> list[str]:
    """The placements that may be proposed instead of another one, fastest first on this machine."""
    ranks = {spec.name: spec.speed for spec in PLACEMENTS.values() if spec.speed is not None}
    if budget.gpu is None:
        return sorted(ranks, key=lambda name: ranks[name].on_cpus)
    if budget.num_ranks == 1:
        return sorted(ranks, key=lambda name: ranks[name].one_process)
    return sorted(ranks, key=lambda name: ranks[name].on_gpus)


def device_packing(network: Network, setup: Setup) -> PackDevices:
    """How device maps would place the teacher on this node's GPUs. The returned call communicates; reads no weights."""

    @cache
    def skeletons() -> tuple[list[ModulePlan], list[int]]:
        plans = plan_quantized_modules(network, setup, is_reader=False)
        for plan in plans:
            separate_shared_names(plan)
        return plans, setup.ranks.gather_on_node(setup.ranks.device.index or 0)

    def look(placement: str, kept_share: float) -> Packing:
        plans, gpus_of_ranks = skeletons()
        rule = PLACEMENTS[placement].import_class().map_rule(setup.options)

        def on_node() -> Packing:
            budgets = budgets_of_devices(setup.ranks, setup.reserved_bytes, gpus_of_ranks, kept_share)
            return replace(pack(plans, rule.make, budgets, rule.allows_disk), maps=[])

        # One rank of the node looks: free memory changes while others do. The worst of the nodes counts.
        packings = setup.ranks.gather(setup.ranks.broadcast_from_local_main(on_node))
        return next((packing for packing in packings if not packing.fits), packings[0])

    return look


def fitting(
    needs: Mapping[str, Footprint],
    budget: MemoryBudget,
    options: Teacher,
    pack_devices: PackDevices | None,
    kept_share: float,
) -> Iterator[str]:
    """The placements that fit, fastest first, each looked for when it is asked for.

    Communicates where `pack_devices` is given: a device map opens a context on every GPU of the node, which takes
    memory there, so it is not made where something faster fits.

    Args:
        needs: of the placements that may run here.
        budget: what is left of the GPUs when `kept_share` of their free memory is kept for activations.
        pack_devices: how device maps would fill this node's GPUs; None on a machine without.
    """

    def fits(name: str) -> bool:
        if name not in needs:
            return False
        if pack_devices is not None and PLACEMENTS[name].uses_device_map:
            return pack_devices(name, kept_share).fits
        gpu = _budget_of(name, budget, options).gpu
        return needs[name].host <= budget.host and (gpu is None or needs[name].gpu <= gpu)

    return (name for name in by_speed(budget) if fits(name))


def check_fits(
    options: Teacher, needs: Mapping[str, Footprint], budget: MemoryBudget, others: Callable[[], Iterable[str]]
) -> None:
    """Raises UserError when the placement takes more than there is, naming those that do fit.

    Args:
        budget: all that the student leaves, with nothing kept for activations: a refusal is certain.
        others: called for the placements that fit.
    """
    name = options.placement
    if name not in needs:
        return
    budget = _budget_of(name, budget, options)
    where, need, free = "of host memory", needs[name].host, budget.host
    if budget.gpu is not None and needs[name].gpu > budget.gpu:
        where, need, free = "on a GPU", needs[name].gpu, budget.gpu
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
    whole: Footprint, budget: MemoryBudget, fits: Callable[[bool], Iterable[str]], reserved: int
) -> tuple[str, str]:
    """`auto`: the placement, and why, in one line.

    Args:
        whole: what `replicated` takes.
        budget: what is left of `AUTO_SHARE` of the free memory.
        fits: the placements that fit, fastest first: with memory for activations (True), or without (False).
        reserved: bytes of the student's state, on each GPU or on the host.
    """
    students = reserved * (budget.num_ranks if budget.gpu is None else 1)
    taken, free = (whole.host, budget.host) if budget.gpu is None else (whole.gpu, budget.gpu)
    where = "host memory" if budget.gpu is None else "the GPU with least"
    reason = (
        f"a whole teacher and the student take {(taken + students) / GIB:.2f} GiB of the {(free + students) / GIB:.2f} "
        f"that are {AUTO_SHARE:.0%} of what {where} has free"
    )
    fitting_names = (name for with_activations in (True, False) for name in fits(with_activations))
    # Where nothing fits, `replicated` is refused with that advice.
    return next((name for name in fitting_names if PLACEMENTS[name].is_auto_candidate), "replicated"), reason


def _budget_of(name: str, budget: MemoryBudget, options: Teacher) -> MemoryBudget:
    """The budget as a placement meets it: of one rank's GPU, where one rank holds the teacher."""
    spec = PLACEMENTS[name]
    return budget if spec.holder is None else budget.of_rank(spec.holder(spec.options.of(options)))
