"""`dedicated`: processes of the teacher's own, on GPUs that train nothing, answer the machine's ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from distiller.config.placements.base import (
    Footprint,
    Links,
    PlacementOptions,
    PlacementSpec,
    Sizes,
    SupportRow,
    TeacherTime,
    TeacherWork,
    World,
)
from distiller.config.sections import NonNegative, Positive

INNER = ("replicated", "streamed", "disk")
"""The values of `teacher.inner`."""


class DedicatedOptions(PlacementOptions):
    """Which GPUs of each machine, and how a process on one of them holds the teacher."""

    devices: Positive | tuple[NonNegative, ...] = Field(
        default=1,
        description="of each machine: how many of the GPUs that no rank trains on, or a list of GPUs, a process on "
        "each; on CPUs the number of processes",
    )
    inner: Literal["replicated", "streamed", "disk"] = Field(
        default="replicated", description="how each process holds the teacher: the placement that it has there"
    )

    @property
    def num_processes(self) -> int:
        """Of the teacher, on each machine."""
        return self.devices if isinstance(self.devices, int) else len(self.devices)


def _memory(sizes: Sizes, options: DedicatedOptions, world: World) -> Footprint:
    # What it takes of the GPUs that train nothing, each process checks for itself before it reads weights.
    in_host_memory = options.inner == "streamed" or (options.inner == "replicated" and not world.num_gpus)
    return Footprint(0, options.num_processes * sizes.total if in_host_memory else 0)


def _check_options(options: DedicatedOptions) -> None:
    given = options.devices
    if not isinstance(given, int) and (not given or len(set(given)) < len(given)):
        raise ValueError(f"teacher.devices is {list(given)}; give at least one GPU, and each once")


def _time(work: TeacherWork, sizes: Sizes, options: DedicatedOptions, world: World, links: Links) -> TeacherTime:
    per_process = work.ms * max(world.num_local_ranks, 1) / options.num_processes
    computing = TeacherTime(per_process, 0.0, "the teacher's own GPUs")
    if options.inner == "streamed":
        return computing.beside(sizes.total, links.host, "host memory to GPU")
    return computing if options.inner == "replicated" else computing.beside(sizes.total, links.disk, "disk")


SPEC = PlacementSpec(
    name="dedicated",
    teacher_class="distiller.teachers.dedicated:DedicatedTeacher",
    options=DedicatedOptions,
    row=SupportRow("none; whole on GPUs that train nothing", "none", "inputs and outputs"),
    memory=_memory,
    time=_time,
    prefetches_in_thread=True,
    computes_elsewhere=True,
    check_options=_check_options,
    # A command that runs in one process has the GPU to itself.
    alone=lambda *_: {"placement": "auto"},
)
