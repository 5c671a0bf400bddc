"""From the recipe's `teacher.placement` to a teacher: chosen, checked, then loaded."""

from __future__ import annotations

from dataclasses import replace

from distiller.teachers import PLACEMENTS
from distiller.teachers.base import Network, Setup, Teacher
from distiller.teachers.footprint import check_fits, choose, footprints, measure, room_of
from distiller.teachers.rules import check_placement


def open_teacher(network: Network, setup: Setup) -> Teacher:
    """Loads the teacher into its place. Communicates. Raises UserError before any weight is read."""
    options = setup.options
    check_placement(options, setup.ranks.world_size, setup.under_deepspeed)
    sizes, room = measure(network, setup.dtype), room_of(setup)
    if options.quantization == "int8":
        sizes = sizes.scaled(1 / setup.dtype.itemsize)
    needs = footprints(sizes, setup, room)
    if options.placement == "auto":
        name, reason = choose(needs, room, setup.reserved_bytes)
        if setup.ranks.is_main:
            print(f"teacher.placement auto: {name} ({reason})")
        options = options.model_copy(update={"placement": name})
        check_placement(options, setup.ranks.world_size, setup.under_deepspeed)
    check_fits(options.placement, needs, room)
    return PLACEMENTS[options.placement](network, replace(setup, options=options))
