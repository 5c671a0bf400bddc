"""Chooses, checks and loads the placement of the teacher that the recipe asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from distiller.config.placements import AUTO, PLACEMENTS
from distiller.config.placements.base import Footprint
from distiller.config.recipe import Recipe
from distiller.config.teacher import Teacher as TeacherOptions
from distiller.distributed.ranks import Ranks
from distiller.launch.block_compilation import MIN_UPDATES, loops_over_positions
from distiller.teachers.base import Network, Setup, Teacher
from distiller.teachers.device_map.maps import ACTIVATION_SHARE, check_custom_map, num_devices
from distiller.teachers.fitting import advice, by_speed, check_fits, choose, device_packing, fitting
from distiller.teachers.footprint import AUTO_SHARE, footprints, measure, memory_budget
from distiller.teachers.rules import check_placement, may_run, why_not_compiled


def resolve_placement(network: Network, setup: Setup) -> Setup:
    """The setup with `auto` replaced by a placement, and checked against ranks, engine and free memory.

    Communicates; reads no weights; what `auto` chose is in the setup's notices. Raises UserError, which names the
    placements that would fit.
    """
    notices = []
    options, ranks = setup.options, setup.ranks
    check_placement(options, ranks.world_size, setup.under_deepspeed)
    if options.placement != AUTO and PLACEMENTS[options.placement].uses_device_map:
        _check_given_map(network, setup)
    sizes, budget, auto_budget = measure(network, setup), memory_budget(setup), memory_budget(setup, AUTO_SHARE)

    def needs_of(beside_update: bool) -> dict[str, Footprint]:
        return {
            name: footprint
            for name, footprint in footprints(sizes, setup, budget, beside_update=beside_update).items()
            if may_run(options, name, ranks.world_size, setup.under_deepspeed)
            and (setup.alternatives is None or name in setup.alternatives)
        }

    needs, needs_beside_update = needs_of(False), needs_of(True)
    pack_devices = device_packing(network, setup) if budget.gpu is not None else None

    def fits(with_activations: bool) -> Iterator[str]:
        if with_activations:
            return fitting(needs_beside_update, auto_budget, options, pack_devices, 1 - AUTO_SHARE, setup.step_ms)
        return fitting(needs, budget, options, pack_devices, ACTIVATION_SHARE, setup.step_ms)

    if options.placement == AUTO:
        name, reason = choose(needs["replicated"], auto_budget, fits, setup)
        notices.append(f"teacher.placement auto: {name} ({reason})")
        options = options.model_copy(update={"placement": name})
    if pack_devices is not None and PLACEMENTS[options.placement].uses_device_map:
        packing = pack_devices(options.placement, ACTIVATION_SHARE)
        if not packing.fits:
            packing.check(options.placement, advice(fits(True)))
    else:
        check_fits(options, needs, budget, lambda: fits(True))
    mode = "none" if why_not_compiled(options, setup.under_deepspeed) else setup.compile_mode
    if options.compile == "auto" and mode != "none" and _loops_over_positions(network, setup):
        mode = "none"
    if options.compile == "auto" and mode != "none":
        notices.append(f"teacher.compile auto: {mode} ({MIN_UPDATES} updates or more)")
    affordable = [name for name in by_speed(budget, setup.step_ms) if name in needs and needs[name].host <= budget.host]
    gpu_bytes = {name: needs_beside_update[name].gpu for name in affordable}
    return replace(setup, options=options, compile_mode=mode, gpu_bytes=gpu_bytes, notices=tuple(notices))


def load_teacher(network: Network, setup: Setup) -> Teacher:
    """Loads the teacher under the placement of `setup`, which `resolve_placement` returned. Communicates.

    Rank 0 prints the setup's notices before: what is refused until then says nothing else.
    """
    if setup.ranks.is_main:
        for notice in setup.notices:
            print(notice)
    return PLACEMENTS[setup.options.placement].import_class()(network, setup)


def open_teacher(network: Network, setup: Setup) -> Teacher:
    """Resolves the placement and loads the teacher. Communicates. Raises UserError before any weight is read."""
    return load_teacher(network, resolve_placement(network, setup))


def open_alone(network: Network, recipe: Recipe, dtype: torch.dtype, device: torch.device) -> Teacher:
    """The teacher for a command of one process, under the placement most similar to the recipe's. Raises UserError.

    Its blocks are not compiled: such a command asks few times. Nor is it asked ahead.
    """
    options: TeacherOptions = recipe.teacher.model_copy(update={"compile": "none", "prefetch_steps": 0})
    if options.placement != AUTO:
        spec = PLACEMENTS[options.placement]
        num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
        options = options.model_copy(update=dict(spec.alone(spec.options.of(options), num_gpus)))
    return open_teacher(network, Setup(dtype, options, Ranks.join(device), stages_dir=recipe.stages_dir))


def _loops_over_positions(network: Network, setup: Setup) -> bool:
    for name in network.module_names:
        module = network.skeleton(name, setup.dtype)
        if any(loops_over_positions(module.get_submodule(block)) for block in network.block_names(name)):
            return True
    return False


def _check_given_map(network: Network, setup: Setup) -> None:
    """Raises UserError if the recipe's device map, where it gives one, does not match the modules and devices."""
    given = PLACEMENTS[setup.options.placement].import_class().map_rule(setup.options).given
    if given is not None:
        modules = [network.skeleton(name, setup.dtype) for name in network.module_names]
        # Machines may differ in their number of GPUs.
        setup.ranks.all_succeed(lambda: check_custom_map(given, modules, num_devices(setup.ranks)))
