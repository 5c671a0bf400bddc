"""`cached`: no teacher at all; its outputs were written by `distiller cache`."""

from __future__ import annotations

from pydantic import Field

from distiller.config.placements.base import PlacementOptions, PlacementSpec, SupportRow, TeacherTime
from distiller.config.sections import OutputLocation


class CachedOptions(PlacementOptions):
    """Where the outputs are."""

    cache: OutputLocation | None = Field(
        default=None, description="the folder that `distiller cache` writes and training reads"
    )


def _check_options(options: CachedOptions) -> None:
    if options.cache is None:
        raise ValueError("teacher.placement=cached needs teacher.cache; give the folder that `distiller cache` writes")


SPEC = PlacementSpec(
    name="cached",
    teacher_class="distiller.teachers.cached:CachedTeacher",
    options=CachedOptions,
    row=SupportRow("none", "none", "nothing"),
    time=lambda *_: TeacherTime(0.0, 0.0),
    loads_teacher=False,
    why_not_compiled="no teacher runs",
    why_not_prefetched="no teacher runs, and the loader reads ahead",
    check_options=_check_options,
    # A command asks of other inputs than the data's: the weights are needed after all.
    alone=lambda *_: {"placement": "auto"},
    paths=("cache",),
    # `distiller cache` writes there with the teacher in any placement.
    shared_keys=("cache",),
)
