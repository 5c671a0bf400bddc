"""`replicated`: the whole teacher on every rank's device."""

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


def _memory(sizes: Sizes, options: NoOptions, world: World) -> Footprint:
    del options
    return Footprint(sizes.total, 0) if world.num_gpus else Footprint(0, sizes.total * world.num_local_ranks)


def _time(work: TeacherWork, sizes: Sizes, options: NoOptions, world: World, links: Links) -> TeacherTime:
    del sizes, options, world, links
    return TeacherTime(work.ms, work.ms)


SPEC = PlacementSpec(
    name="replicated",
    teacher_class="distiller.teachers.replicated:ReplicatedTeacher",
    options=NoOptions,
    row=SupportRow("whole", "none", "nothing"),
    memory=_memory,
    time=_time,
    speed=SpeedRank(on_gpus=10, one_process=10, on_cpus=10),
    is_auto_candidate=True,
)
