"""`disk`: blocks are read from safetensors files into a few buffers; for teachers larger than memory."""

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
from distiller.config.placements.shared_options import BlockBufferOptions, FileReadingOptions, PinnedMemoryOptions


class DiskOptions(FileReadingOptions, BlockBufferOptions, PinnedMemoryOptions):
    """How blocks get from files to the GPUs, and which of them stay there."""


def _memory(sizes: Sizes, options: DiskOptions, world: World) -> Footprint:
    on_device = options.device_bytes(sizes)
    if not world.num_gpus:
        return Footprint(0, on_device * world.num_local_ranks)
    # Two buffers of a block, from which the GPU copies.
    return Footprint(on_device, 2 * sizes.largest_block * world.num_local_ranks)


def _time(work: TeacherWork, sizes: Sizes, options: DiskOptions, world: World, links: Links) -> TeacherTime:
    # Ranks read the same blocks at about the same time, and the page cache has them then.
    del world
    num_bytes = options.passing_bytes(sizes) * (1 if options.amortise else work.num_passes)
    return (
        TeacherTime(work.ms, work.ms)
        .beside(num_bytes, links.host, "host memory to GPU")
        .beside(num_bytes, links.disk, "disk")
    )


SPEC = PlacementSpec(
    name="disk",
    teacher_class="distiller.teachers.disk:DiskTeacher",
    options=DiskOptions,
    row=SupportRow("as streamed", "page cache, two blocks a rank", "nothing"),
    memory=_memory,
    time=_time,
    speed=SpeedRank(on_gpus=80, one_process=80, on_cpus=90),
    is_auto_candidate=True,
    prefetches_in_thread=True,
)
