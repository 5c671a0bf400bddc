"""`custom`: one copy a node, each part where `teacher.device_map` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from distiller.config.placements.base import PlacementSpec, SupportRow
from distiller.config.placements.shared_options import FileReadingOptions, PinnedMemoryOptions
from distiller.config.sections import NonNegative


class CustomOptions(FileReadingOptions, PinnedMemoryOptions):
    """Where each part lies."""

    device_map: dict[str, NonNegative | Literal["cpu", "disk"]] | None = Field(
        default=None, description="module name to GPU number, cpu or disk, as in Accelerate"
    )


def _check_options(options: CustomOptions) -> None:
    if not options.device_map:
        raise ValueError(
            "teacher.placement=custom needs teacher.device_map, for example {'blocks.0': 0, 'blocks.1': cpu, '': 0}"
        )


def _alone(options: CustomOptions, num_gpus: int) -> Mapping[str, object]:
    if num_gpus or options.device_map is None:
        return {}
    # Without GPUs the numbers stood for ranks, of which there is one.
    return {"device_map": {name: 0 if isinstance(at, int) else at for name, at in options.device_map.items()}}


SPEC = PlacementSpec(
    name="custom",
    teacher_class="distiller.teachers.custom:CustomTeacher",
    options=CustomOptions,
    row=SupportRow("as `device_map` says", "as `device_map` says", "as balanced"),
    uses_device_map=True,
    check_options=_check_options,
    alone=_alone,
)
