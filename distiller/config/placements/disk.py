"""`disk`: blocks are read from safetensors files into a few buffers; for teachers larger than memory."""

from __future__ import annotations

from distiller.config.placements.base import Footprint, PlacementSpec, Sizes, SpeedRank, SupportRow, World
from distiller.config.placements.shared_options import BlockBufferOptions, FileReadingOptions, PinnedMemoryOptions


class DiskOptions(FileReadingOptions, BlockBufferOptions, PinnedMemoryOptions):
    """How blocks get from files to the GPUs, and which of them stay there."""


def _memory(sizes: Sizes, options: DiskOptions, world: World) -> Footprint:
    on_device = options.device_bytes(sizes)
    if not world.num_gpus:
        return Footprint(0, on_device * world.num_local_ranks)
    # Two buffers of a block, from which the GPU copies.
    return Footprint(on_device, 2 * sizes.largest_block * world.num_local_ranks)


SPEC = PlacementSpec(
    name="disk",
    teacher_class="distiller.teachers.disk:DiskTeacher",
    options=DiskOptions,
    row=SupportRow("as streamed", "page cache, two blocks a rank", "nothing"),
    memory=_memory,
    speed=SpeedRank(on_gpus=80, one_process=80, on_cpus=90),
    is_auto_candidate=True,
    prefetches_in_thread=True,
)
