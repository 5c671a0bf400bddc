"""`cpu`: the teacher computes on the CPU, from one copy that the node's ranks share."""

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
    del options, world
    return Footprint(0, sizes.total)


SPEC = PlacementSpec(
    name="cpu",
    teacher_class="distiller.teachers.cpu:CpuTeacher",
    options=NoOptions,
    row=SupportRow("none", "one copy, shared", "nothing"),
    memory=_memory,
    speed=SpeedRank(on_gpus=90, one_process=90, on_cpus=30),
    is_auto_candidate=True,
)
