"""`balanced`: one copy a node, about equal shares of it on each of the node's GPUs."""

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
    if not world.num_gpus:
        return Footprint(0, sizes.total)
    return Footprint(sizes.total // world.num_gpus + sizes.largest_block, 0)


def _time(work: TeacherWork, sizes: Sizes, options: NoOptions, world: World, links: Links) -> TeacherTime:
    del sizes, options, links
    # Each GPU computes its part of every rank's passes.
    of_each = work.ms * world.num_local_ranks / world.num_gpus
    in_all = work.ms * time_through_parts(work.num_passes, world)
    return TeacherTime(in_all, of_each, "parts on GPUs that wait for each other")


SPEC = PlacementSpec(
    name="balanced",
    teacher_class="distiller.teachers.balanced:BalancedTeacher",
    options=NoOptions,
    row=SupportRow("its part of one copy", "none", "turns on the GPUs"),
    memory=_memory,
    time=_time,
    speed=SpeedRank(on_gpus=40, one_process=20, on_cpus=20),
    is_auto_candidate=True,
    uses_device_map=True,
)
