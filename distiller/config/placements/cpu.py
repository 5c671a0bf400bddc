"""`cpu`: the teacher computes on the CPU, from one copy that the node's ranks share."""

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

NUM_FLOAT32_BUFFERS = 2
"""One block computes while the next one is converted."""


def _memory(sizes: Sizes, options: NoOptions, world: World) -> Footprint:
    del options
    # In 16 bits every rank also makes the float32 copies with which it may compute: see CpuTeacher.
    float32_copies = 0
    if sizes.item_bytes < 4 and sizes.num_blocks:
        num_buffers = min(NUM_FLOAT32_BUFFERS, sizes.num_blocks)
        float32_copies = (sizes.rest + num_buffers * sizes.largest_block) * 4 // sizes.item_bytes
    return Footprint(0, sizes.total + float32_copies * world.num_local_ranks)


def _time(work: TeacherWork, sizes: Sizes, options: NoOptions, world: World, links: Links) -> TeacherTime:
    del sizes, options
    # The ranks of a machine share its cores.
    return TeacherTime(work.ms * links.cpu_slowdown * max(world.num_local_ranks, 1), 0.0, "CPU")


SPEC = PlacementSpec(
    name="cpu",
    teacher_class="distiller.teachers.cpu:CpuTeacher",
    options=NoOptions,
    row=SupportRow("none", "one copy, shared", "nothing"),
    memory=_memory,
    time=_time,
    speed=SpeedRank(on_gpus=90, one_process=90, on_cpus=30),
    is_auto_candidate=True,
    prefetches_in_thread=True,
    why_not_compiled="it computes on the CPU, in the dtype that it finds to be faster",
)
