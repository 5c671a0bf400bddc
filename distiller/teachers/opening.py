"""From the recipe's `teacher.placement` to a teacher: chosen, checked, then loaded."""

from __future__ import annotations

from dataclasses import replace

import torch

from distiller.ranks import Ranks
from distiller.teacher_config import Teacher as TeacherOptions
from distiller.teachers import PLACEMENTS
from distiller.teachers.base import Network, Setup, Teacher
from distiller.teachers.device_maps import check_custom_map, num_devices
from distiller.teachers.footprint import check_fits, choose, footprints, measure, room_of
from distiller.teachers.rules import check_placement, may_run


def decide(network: Network, setup: Setup) -> Setup:
    """The setup with `auto` resolved, said in one line, and checked against this world and its memory. Communicates.

    Raises UserError, before any weight is read, naming what would fit.
    """
    options, ranks = setup.options, setup.ranks
    check_placement(options, ranks.world_size, setup.under_deepspeed)
    if options.placement == "custom":
        modules = [network.skeleton(name, setup.dtype) for name in network.module_names]
        check_custom_map(options.device_map or {}, modules, num_devices(ranks))
    sizes, room = measure(network, setup.dtype), room_of(setup)
    if options.quantization == "int8":
        sizes = sizes.scaled(1 / setup.dtype.itemsize)
    needs = footprints(sizes, setup, room)
    needs = {name: n for name, n in needs.items() if may_run(options, name, ranks.world_size, setup.under_deepspeed)}
    if options.placement == "auto":
        name, reason = choose(needs, room, setup.reserved_bytes)
        if ranks.is_main:
            print(f"teacher.placement auto: {name} ({reason})")
        options = options.model_copy(update={"placement": name})
    check_fits(options, needs, room)
    return replace(setup, options=options)


def open_teacher(network: Network, setup: Setup) -> Teacher:
    """Loads the teacher into its place. Communicates. Raises UserError before any weight is read."""
    setup = decide(network, setup)
    return PLACEMENTS[setup.options.placement](network, setup)


def open_alone(network: Network, options: TeacherOptions, dtype: torch.dtype, device: torch.device) -> Teacher:
    """The teacher of a command that runs in one process, in the place nearest to that of the run. Raises UserError.

    There is no other rank to hold it (`rank0`), and nobody to share shards with: those that waited in host memory or on
    a disk stream from there.
    """
    changes: dict[str, object] = {"rank": 0}
    if options.placement == "cached":
        # Other inputs than the data's: the weights are needed after all.
        changes["placement"] = "auto"
    if options.placement == "sharded":
        alone = {"none": "balanced" if torch.cuda.device_count() > 1 else "replicated", "cpu": "streamed"}
        changes["placement"] = alone.get(options.offload, "disk")
    if options.device_map is not None and device.type == "cpu":
        # Without GPUs the numbers stood for ranks, of which there is one.
        changes["device_map"] = {k: 0 if isinstance(v, int) else v for k, v in options.device_map.items()}
    return open_teacher(network, Setup(dtype, options.model_copy(update=changes), Ranks.join(device)))
