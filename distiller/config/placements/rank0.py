"""`rank0`: the whole teacher on one rank's device, which answers for all ranks."""

from __future__ import annotations

from pydantic import Field

from distiller.config.placements.base import (
    Footprint,
    Links,
    PlacementOptions,
    PlacementSpec,
    Sizes,
    SpeedRank,
    SupportRow,
    TeacherTime,
    TeacherWork,
    World,
)
from distiller.config.sections import NonNegative, Positive
from distiller.errors import UserError


class Rank0Options(PlacementOptions):
    """Which rank, and how much of all ranks' samples at once."""

    rank: NonNegative = Field(default=0, description="the rank that holds the teacher")
    micro_batch: Positive | None = Field(default=None, description="samples a forward pass; None = all ranks' at once")


def _memory(sizes: Sizes, options: Rank0Options, world: World) -> Footprint:
    del options
    return Footprint(sizes.total, 0) if world.num_gpus else Footprint(0, sizes.total)


def _check_world(options: Rank0Options, num_processes: int, under_deepspeed: bool) -> None:
    del under_deepspeed
    if options.rank >= num_processes:
        raise UserError(
            f"teacher.rank is {options.rank} and the run has {num_processes} rank(s), counted from 0; give at most "
            f"{num_processes - 1}, or start more processes"
        )


def _time(work: TeacherWork, sizes: Sizes, options: Rank0Options, world: World, links: Links) -> TeacherTime:
    del sizes, options, links
    in_all = work.ms * world.num_processes
    return TeacherTime(in_all, in_all, "one GPU that answers for all")


SPEC = PlacementSpec(
    name="rank0",
    teacher_class="distiller.teachers.rank0:Rank0Teacher",
    options=Rank0Options,
    row=SupportRow("whole on one rank", "none", "inputs and outputs"),
    memory=_memory,
    time=_time,
    speed=SpeedRank(on_gpus=50, one_process=60, on_cpus=60),
    check_world=_check_world,
    holder=lambda options: options.rank,
    alone=lambda *_: {"rank": 0},
)
