"""`sequential`: one copy a node, which fills one GPU after the other."""

from __future__ import annotations

from distiller.config.placements.base import (
    Footprint,
    Links,
    NoOptions,
    PlacementSpec,
    Sizes,
    SpeedRank,
    SupportRow,
    TeacherTime,
    TeacherWork,
    World,
)
from distiller.config.placements.shared_options import time_through_parts


def _memory(sizes: Sizes, options: NoOptions, world: World) -> Footprint:
    del options
    return Footprint(sizes.total // world.num_gpus, 0) if world.num_gpus else Footprint(0, sizes.total)


def _time(work: TeacherWork, sizes: Sizes, options: NoOptions, world: World, links: Links) -> TeacherTime:
    del sizes, options, links
    # Each GPU computes its part of every rank's passes.
    of_each = work.ms * world.num_local_ranks / world.num_gpus
    in_all = work.ms * time_through_parts(work.num_passes, world)
    return TeacherTime(in_all, of_each, "parts on GPUs that wait for each other")


SPEC = PlacementSpec(
    name="sequential",
    teacher_class="distiller.teachers.sequential:SequentialTeacher",
    options=NoOptions,
    row=SupportRow("its part of one copy", "none", "as balanced"),
    memory=_memory,
    time=_time,
    speed=SpeedRank(on_gpus=60, one_process=30, on_cpus=40),
    uses_device_map=True,
)
