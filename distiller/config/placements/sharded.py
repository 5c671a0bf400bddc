"""`sharded`: every rank holds its share of each tensor, on its device or off it."""

from __future__ import annotations

from collections.abc import Mapping
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
from distiller.config.placements.shared_options import PinnedMemoryOptions
from distiller.config.sections import Location
from distiller.errors import UserError


class ShardedOptions(PinnedMemoryOptions):
    """Where the shares are while no forward pass needs them."""

    offload: Literal["none", "cpu", "nvme"] = Field(default="none", description="where the shards wait")
    nvme_path: Location | None = Field(default=None, description="a folder on a local disk, for offload nvme")


def _check_options(options: ShardedOptions) -> None:
    if options.offload == "nvme" and options.nvme_path is None:
        raise ValueError("teacher.offload=nvme needs teacher.nvme_path; give a folder on a local disk")


def _check_world(options: ShardedOptions, num_processes: int, under_deepspeed: bool) -> None:
    del num_processes
    if options.offload == "nvme" and not under_deepspeed:
        raise UserError(
            "teacher.offload is nvme, which only DeepSpeed does, and the student's engine is not DeepSpeed; use a ZeRO "
            "launch file, or teacher.offload=cpu, or teacher.placement=disk"
        )


def _memory(sizes: Sizes, options: ShardedOptions, world: World) -> Footprint:
    # While a block computes, the next one is gathered.
    gathered = 2 * sizes.largest_block
    if not world.num_gpus:
        return Footprint(0, sizes.total + gathered * world.num_local_ranks)
    if options.offload == "none":
        return Footprint(sizes.total // world.num_processes + sizes.rest + gathered, 0)
    in_host_memory = sizes.total * world.num_local_ranks // world.num_processes if options.offload == "cpu" else 0
    return Footprint(sizes.rest + gathered, in_host_memory)


def _alone(options: ShardedOptions, num_gpus: int) -> Mapping[str, object]:
    """There is nobody to share with: shares that waited in host memory or on a disk are streamed from there."""
    on_gpus = "balanced" if num_gpus > 1 else "replicated"
    return {"placement": {"none": on_gpus, "cpu": "streamed", "nvme": "disk"}[options.offload]}


def _time(work: TeacherWork, sizes: Sizes, options: ShardedOptions, world: World, links: Links) -> TeacherTime:
    # Every pass gathers every block.
    num_bytes, share = sizes.total * work.num_passes, 1 / world.num_processes
    gathered = TeacherTime(work.ms, work.ms).beside(num_bytes * (1 - share), links.peers, "GPU to GPU")
    if options.offload == "none":
        return gathered
    rate, link = (links.host, "host memory to GPU") if options.offload == "cpu" else (links.disk, "disk")
    return gathered.beside(num_bytes * share, rate, link)


SPEC = PlacementSpec(
    name="sharded",
    teacher_class="distiller.teachers.sharded:ShardedTeacher",
    options=ShardedOptions,
    row=SupportRow("1/N, and one block or two", "none, or 1/N a rank", "every block, gathered", "FSDP2", "ZeRO-3"),
    memory=_memory,
    time=_time,
    speed=SpeedRank(on_gpus=30, one_process=50, on_cpus=50),
    why_not_compiled_beside_deepspeed="ZeRO-3 gathers parameters inside the blocks",
    why_not_quantized="FSDP and ZeRO-3 shard floating-point parameters only",
    check_options=_check_options,
    check_world=_check_world,
    alone=_alone,
    paths=("nvme_path",),
)
