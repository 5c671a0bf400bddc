"""`streamed`: one host copy a node; blocks pass through a few buffers on each GPU, copied ahead."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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
from distiller.config.placements.shared_options import BlockBufferOptions, PinnedMemoryOptions
from distiller.config.sections import Switch


class StreamedOptions(BlockBufferOptions, PinnedMemoryOptions):
    """How blocks get to the GPUs, and which of them stay there."""

    shard_transfers: Switch | Literal["auto"] = Field(
        default="auto",
        description="each rank copies its share of a block, NVLink does the rest; auto = with 2 GPUs or more",
    )


def _memory(sizes: Sizes, options: StreamedOptions, world: World) -> Footprint:
    on_device, in_host_copy = options.device_bytes(sizes), options.passing_bytes(sizes)
    if not world.num_gpus:
        return Footprint(0, on_device * world.num_local_ranks + in_host_copy)
    return Footprint(on_device, in_host_copy)


def _time(work: TeacherWork, sizes: Sizes, options: StreamedOptions, world: World, links: Links) -> TeacherTime:
    num_bytes, shares = options.passing_bytes(sizes), options.shard_transfers
    if not options.amortise:
        num_bytes *= work.num_passes
    num_shares = max(world.num_local_ranks, 1) if shares in (True, "auto") else 1
    copied = TeacherTime(work.ms, work.ms).beside(num_bytes / num_shares, links.host, "host memory to GPU")
    if num_shares == 1:
        return copied
    return copied.beside(num_bytes * (1 - 1 / num_shares), links.peers, "GPU to GPU")


SPEC = PlacementSpec(
    name="streamed",
    teacher_class="distiller.teachers.streamed:StreamedTeacher",
    options=StreamedOptions,
    row=SupportRow("`ring_blocks` and `resident_blocks`", "one page-locked copy, shared", "shares of blocks"),
    memory=_memory,
    time=_time,
    speed=SpeedRank(on_gpus=20, one_process=40, on_cpus=70),
    is_auto_candidate=True,
)
