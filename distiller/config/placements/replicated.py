"""`replicated`: the whole teacher on every rank's device."""

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
    return Footprint(sizes.total, 0) if world.num_gpus else Footprint(0, sizes.total * world.num_local_ranks)


SPEC = PlacementSpec(
    name="replicated",
    teacher_class="distiller.teachers.replicated:ReplicatedTeacher",
    options=NoOptions,
    row=SupportRow("whole", "none", "nothing"),
    memory=_memory,
    speed=SpeedRank(on_gpus=10, one_process=10, on_cpus=10),
    is_auto_candidate=True,
)
