"""The strict base class of the recipe's sections, and the types of their values. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Switch = Annotated[bool, Field(strict=True)]
Positive = Annotated[int, Field(gt=0, strict=True)]
NonNegative = Annotated[int, Field(ge=0, strict=True)]
Float = Annotated[float, Field(strict=True)]
PositiveFloat = Annotated[Float, Field(gt=0)]
Weight = Annotated[Float, Field(ge=0)]
Location = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
OutputLocation = Annotated[Location, AfterValidator(os.path.expanduser)]
"""A folder that is written; ~ is the home folder."""
DType = Literal["auto", "float32", "bfloat16", "float16"]


class Section(BaseModel):
    """A part of the recipe: immutable, closed to unknown keys, no NaN and no infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, under dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return leaves
