"""The registry of teacher placements: one specification and one class each, chosen by `teacher.placement`. No torch."""

from importlib import import_module
from typing import Any

from distiller.config.placements.base import PlacementSpec

_NAMES = (
    "replicated",
    "cpu",
    "streamed",
    "disk",
    "balanced",
    "sequential",
    "custom",
    "rank0",
    "dedicated",
    "sharded",
    "swap",
    "cached",
)
"""Of the files beside this one, each with a `SPEC`; in the order in which users see the placements."""

PLACEMENTS: dict[str, PlacementSpec[Any]] = {name: import_module(f"{__name__}.{name}").SPEC for name in _NAMES}

AUTO = "auto"
"""The value of `teacher.placement` that chooses one of them by memory and speed."""
