"""Which placements fit into free memory, for `auto`, for refusals and for the advice in them."""

from __future__ import annotations

import math
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
from distiller.teachers.footprint import AUTO_SHARE, FILLED_SHARE
from distiller.teachers.quantization.modules import plan_quantized_modules
from distiller.teachers.weights.loading import ModulePlan

GIB = 2**30

PackDevices = Callable[[str, float], Packing]
"""(placement, share of each GPU's free memory to keep for activations) -> how its device maps fill the node's GPUs."""


def by_speed(budget: MemoryBudget, step_ms: Mapping[str, float] | None = None) -> list[str]:
    """The placements that may be proposed instead of another one, fastest first on this machine.

    By predicted times, to whole milliseconds, where there are any; else, and where these are equal, as was measured.
    """
    order = _by_measured_speed(budget)
    predicted = step_ms or {}
    return sorted(order, key=lambda name: round(predicted.get(name, math.inf if predicted else 0.0), 0))


def _by_measured_speed(budget: MemoryBudget) -> list[str]:
    speeds = {spec.name: spec.speed for spec in PLACEMENTS.values() if spec.speed is not None}
    if budget.gpu is None:
        return sorted(speeds, key=lambda name: speeds[name].on_cpus)
    if budget.num_ranks == 1:
        return sorted(speeds, key=lambda name: speeds[name].one_process)
    return sorted(speeds, key=lambda name: speeds[name].on_gpus)


def device_packing(network: Network, setup: Setup) -> PackDevices:
    """A function that says how device maps would place the teacher on this node's GPUs.

    The returned function communicates; it reads no weights.
    """

    @cache
    def skeletons() -> tuple[list[ModulePlan], list[int]]:
        plans = plan_quantized_modules(network, setup, is_reader=False)
        for plan in plans:
            separate_shared_names(plan)
        return plans, setup.ranks.gather_on_node(setup.ranks.device.index or 0)

    def pack_on_nodes(placement: str, kept_share: float) -> Packing:
        plans, gpus_of_ranks = skeletons()
        rule = PLACEMENTS[placement].import_class().map_rule(setup.options)

        ranks = setup.ranks

        def on_node() -> Packing:
            budgets = budgets_of_devices(setup, gpus_of_ranks, kept_share)
            return replace(pack(plans, rule.make, budgets, rule.allows_disk), maps=[])

        # Only one rank of a node measures, since measuring changes the free memory. The maps must fit on every node.
        packings = ranks.gather(ranks.all_succeed(lambda: ranks.broadcast_from_local_main(on_node)))
        return next((packing for packing in packings if not packing.fits), packings[0])

    return pack_on_nodes


def fitting(
    needs: Mapping[str, Footprint],
    budget: MemoryBudget,
    options: Teacher,
    pack_devices: PackDevices | None,
    kept_share: float,
    step_ms: Mapping[str, float] | None = None,
) -> Iterator[str]:
    """The placements that fit, fastest first; each is checked only when the iterator comes to it.

    Communicates where `pack_devices` is given. Making a device map opens a CUDA context on every GPU of the node, which
    takes memory there, so no map is made if a faster placement is accepted before.

    Args:
        needs: placement -> its footprint, for placements that may run here.
        budget: bytes for the teacher when `kept_share` of free memory is kept for activations.
        pack_devices: how device maps would fill this node's GPUs; None on a machine without GPUs.
        step_ms: see `by_speed`.
    """

    def fits(name: str) -> bool:
        if name not in needs:
            return False
        if pack_devices is not None and PLACEMENTS[name].uses_device_map:
            return pack_devices(name, kept_share).fits
        gpu = _budget_of(name, budget, options).gpu
        return needs[name].host <= budget.host and (gpu is None or needs[name].gpu <= gpu)

    return (name for name in by_speed(budget, step_ms) if fits(name))


def check_fits(
    options: Teacher, needs: Mapping[str, Footprint], budget: MemoryBudget, others: Callable[[], Iterable[str]]
) -> None:
    """Raises UserError, which names the placements that fit, if the recipe's takes more memory than there is.

    Args:
        budget: all that the student leaves. Nothing is kept for activations, so that what is refused cannot work.
        others: returns the placements that fit; called only for a refusal.
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
    """The end of a refusal: what to choose instead."""
    if listed := ", ".join(names):
        return f"these fit, fastest first: {listed}"
    return "no placement fits, so choose a smaller teacher.dtype or a smaller student"


def choose(
    whole: Footprint, budget: MemoryBudget, fits: Callable[[bool], Iterable[str]], setup: Setup
) -> tuple[str, str]:
    """(The placement that `auto` chooses, the reason in one line).

    Args:
        whole: footprint of `replicated`.
        budget: what student and updates leave of the free memory; see `kept_for_updates`.
        fits: the placements that fit, fastest first: with memory for updates (True), or without (False).
        setup: the student's memory, what is known of an update, and predicted times.
    """
    is_known = budget.gpu is not None and setup.update_bytes is not None
    update = setup.update_bytes or 0 if is_known else 0
    student = (setup.reserved_bytes + update) * (budget.num_ranks if budget.gpu is None else 1)
    taken, free = (whole.host, budget.host) if budget.gpu is None else (whole.gpu, budget.gpu)
    where = "host memory" if budget.gpu is None else "the GPU with least"
    holders = "a whole teacher, the student and an update" if is_known else "a whole teacher and the student"
    reason = (
        f"{holders} take {(taken + student) / GIB:.2f} GiB of the {(free + student) / GIB:.2f} that are "
        f"{FILLED_SHARE if is_known else AUTO_SHARE:.0%} of what {where} has free"
    )
    fitting_names = (name for with_updates in (True, False) for name in fits(with_updates))
    candidates = (name for name in fitting_names if PLACEMENTS[name].is_auto_candidate and name not in setup.excluded)
    # If nothing fits, the caller's check refuses `replicated` and says so.
    chosen = next(candidates, "replicated")
    if chosen in setup.excluded:
        raise UserError(
            f"teacher.placement auto: no placement fits but those that --auto-without leaves out "
            f"({', '.join(setup.excluded)}); name one, or lower what an update takes (train.batch_size)"
        )
    if setup.excluded:
        reason = f"without {' and '.join(setup.excluded)}, which --auto-without leaves out; {reason}"
    order = by_speed(budget, setup.step_ms)
    if setup.step_ms and chosen in order:
        slower = [name for name in order[order.index(chosen) + 1 :] if PLACEMENTS[name].is_auto_candidate]
        times = [f"{name} {setup.step_ms[name]:,.0f} ms" for name in (chosen, *slower[:2]) if name in setup.step_ms]
        reason += f"; an update is predicted to take, by placement: {', '.join(times)}"
    return chosen, reason


def _budget_of(name: str, budget: MemoryBudget, options: Teacher) -> MemoryBudget:
    """The budget that counts for a placement: if one rank alone holds the teacher, that of this rank's GPU."""
    spec = PLACEMENTS[name]
    return budget if spec.holder is None else budget.of_rank(spec.holder(spec.options.of(options)))
