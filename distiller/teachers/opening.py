"""From the recipe's `teacher.placement` to a teacher: chosen, checked, then loaded."""

from __future__ import annotations

from dataclasses import replace

import torch

from distiller.ranks import Ranks
from distiller.teacher_config import Teacher as TeacherOptions
from distiller.teachers import PLACEMENTS
from distiller.teachers.base import Network, Setup, Teacher
from distiller.teachers.footprint import check_fits, choose, footprints, measure, older_rule, room_of
from distiller.teachers.rules import check_placement


def decide(network: Network, setup: Setup) -> Setup:
    """The setup with `auto` resolved, said in one line, and checked against this world and its memory. Communicates.

    Raises UserError, before any weight is read, naming what would fit.
    """
    options = setup.options
    check_placement(options, setup.ranks.world_size, setup.under_deepspeed)
    sizes, room = measure(network, setup.dtype), room_of(setup)
    if options.quantization == "int8":
        sizes = sizes.scaled(1 / setup.dtype.itemsize)
    needs = footprints(sizes, setup, room)
    if options.placement == "auto":
        name, reason = choose(needs, room, setup.reserved_bytes)
        if setup.ranks.is_main:
            print(f"teacher.placement auto: {name} ({reason}; the older trainer's rule: {older_rule(room)})")
        options = options.model_copy(update={"placement": name})
        check_placement(options, setup.ranks.world_size, setup.under_deepspeed)
    check_fits(options.placement, needs, room)
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
    if options.placement == "sharded" and options.offload != "none":
        changes["placement"] = "streamed" if options.offload == "cpu" else "disk"
    return open_teacher(network, Setup(dtype, options.model_copy(update=changes), Ranks.join(device)))
