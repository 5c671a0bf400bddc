"""The recipe's section on the teacher: which one, and where it lives. Importing this module does not import torch.

Keys of one placement are declared in its file of `distiller.config.placements`; the section inherits them all.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, create_model, model_validator
from pydantic.fields import FieldInfo

from distiller.config.placements import AUTO, PLACEMENTS
from distiller.config.placements.cached import CachedOptions
from distiller.config.placements.keys import (
    in_words,
    owners,
    placement_names,
    readers,
    unread_keys,
)
from distiller.config.quantization import Quantization
from distiller.config.sections import DType, Location, NonNegative, PositiveFloat, Section
from distiller.errors import shown


class TeacherKeys(Section):
    """The frozen network and where it lives. A key that its placement does not read keeps its default."""

    path: Location = Field(description="a diffusers pipeline folder, a hub id, or asset:NAME for a packaged one")
    revision: Location | None = Field(default=None, description="of a hub id: branch, tag or commit")
    subfolder: Location | None = Field(default=None, description="where in the folder or repository the pipeline lies")
    placement: str = Field(
        default=AUTO,
        description="where it lives; auto = the fastest place that fits; docs/MODEL_LOADING_STRATEGIES.md compares",
    )
    dtype: DType = Field(default="auto", description="auto = bfloat16 on a GPU that has it, float32 otherwise")
    quantization: Quantization = Field(default="none", description="of linear layers' weights, in every placement but")
    max_quantization_error: PositiveFloat | None = Field(
        default=None, description="the run is refused where quantised outputs differ more, relative; null = any"
    )
    compile: Literal["auto", "none", "default", "max-autotune"] = Field(
        default="auto",
        description="the blocks, in a mode of torch.compile; auto = default on a GPU, in a run of 500 updates or more",
    )
    prefetch_steps: NonNegative = Field(
        default=0,
        description="updates that it answers ahead of the student, beside which it then computes; 0 = none; in every "
        "placement but",
    )

    @model_validator(mode="after")
    def _suits_the_placement(self) -> Self:
        if self.placement in PLACEMENTS:
            spec = PLACEMENTS[self.placement]
            spec.check_options(spec.options.of(self))
        if self.max_quantization_error is not None and self.quantization == "none":
            raise ValueError("teacher.max_quantization_error limits the error of a quantised teacher; set quantization")
        for key in unread_keys(self.placement):
            value = getattr(self, key)
            if value != type(self).model_fields[key].default:
                raise ValueError(
                    f"teacher.{key} is {shown(value)}, which teacher.placement {self.placement} does not read; leave "
                    f"it out, or choose a placement that does: {in_words(readers(key), 'or')}"
                )
        return self


def make_section() -> type[TeacherKeys]:
    """The section with the keys of all registered placements, each described with the names of those that read it."""
    fields: dict[str, FieldInfo] = {}
    for spec in PLACEMENTS.values():
        fields |= spec.options.model_fields
    described: dict[str, Any] = {
        key: (field.annotation, _described(field, f"{', '.join(owners(key))}: {field.description}"))
        for key, field in fields.items()
    }
    own = TeacherKeys.model_fields
    described["placement"] = Literal[placement_names()], own["placement"]
    others = [spec.name for spec in PLACEMENTS.values() if spec.why_not_quantized]
    held = f"{own['quantization'].description} {in_words(others, 'and')}"
    described["quantization"] = own["quantization"].annotation, _described(own["quantization"], held)
    waiting = [spec.name for spec in PLACEMENTS.values() if spec.why_not_prefetched]
    ahead = f"{own['prefetch_steps'].description} {in_words(waiting, 'and')}"
    described["prefetch_steps"] = own["prefetch_steps"].annotation, _described(own["prefetch_steps"], ahead)
    # The last base's fields come first in the section.
    bases = (*reversed(dict.fromkeys(spec.options for spec in PLACEMENTS.values())), TeacherKeys)
    return create_model("Teacher", __base__=bases, __doc__=TeacherKeys.__doc__, **described)


def _described(field: FieldInfo, description: str) -> FieldInfo:
    field = copy(field)
    field.description = description
    return field


if TYPE_CHECKING:

    class Teacher(CachedOptions, TeacherKeys):
        """What every reader may use: the keys of no single placement, and `cache`, which `distiller cache` writes."""

else:
    Teacher = make_section()
