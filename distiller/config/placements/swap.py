"""`swap`: the teacher is in host memory, and a whole module is copied to the device to answer."""

from __future__ import annotations

from distiller.config.placements.base import (
    Footprint,
    Links,
    PlacementSpec,
    Sizes,
    SpeedRank,
    SupportRow,
    TeacherTime,
    TeacherWork,
    World,
)
from distiller.config.placements.shared_options import PinnedMemoryOptions


class SwapOptions(PinnedMemoryOptions):
    """How host memory is held."""


def _memory(sizes: Sizes, options: SwapOptions, world: World) -> Footprint:
    del options
    in_host_copies = sizes.total * world.num_local_ranks
    if not world.num_gpus:
        return Footprint(0, sizes.largest_module * world.num_local_ranks + in_host_copies)
    return Footprint(sizes.largest_module, in_host_copies)


def _time(work: TeacherWork, sizes: Sizes, options: SwapOptions, world: World, links: Links) -> TeacherTime:
    del options, world
    return TeacherTime(work.ms, work.ms).after(sizes.total, links.host, "host memory to GPU")


SPEC = PlacementSpec(
    name="swap",
    teacher_class="distiller.teachers.swap:SwapTeacher",
    options=SwapOptions,
    row=SupportRow("whole while it runs", "one copy a rank", "nothing"),
    memory=_memory,
    time=_time,
    leaves_gpu=True,
    why_not_prefetched="its weights leave the GPU so that the student can train",
    speed=SpeedRank(on_gpus=70, one_process=70, on_cpus=80),
)
