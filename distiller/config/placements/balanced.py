"""`balanced`: one copy a node, about equal shares of it on each of the node's GPUs."""

from __future__ import annotations

from distiller.config.placements.base import (
    Footprint,
    NoOptions,
    PlacementSpec,
    Sizes,
    SpeedRank,
    SupportRow,
    World,
)


def _memory(sizes: Sizes, options: NoOptions, world: World) -> Footprint:
    del options
    if not world.num_gpus:
        return Footprint(0, sizes.total)
    return Footprint(sizes.total // world.num_gpus + sizes.largest_block, 0)


SPEC = PlacementSpec(
    name="balanced",
    teacher_class="distiller.teachers.balanced:BalancedTeacher",
    options=NoOptions,
    row=SupportRow("its part of one copy", "none", "turns on the GPUs"),
    memory=_memory,
    speed=SpeedRank(on_gpus=40, one_process=20, on_cpus=20),
    is_auto_candidate=True,
    uses_device_map=True,
)
