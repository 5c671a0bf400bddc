"""The folders in which finished stages are looked for, and the one in which new stages are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

CACHED_STAGES = "stages"
"""The subfolder of a teacher cache that holds the stages which its outputs were made from."""


@final
@dataclass(frozen=True)
class StageFolders:
    """The run's folder of stages, and a second one whose finished stages are used where the first has none.

    Attributes:
        primary: where stages are made.
        cached: inside the teacher cache that the recipe names; stages only read it.
    """

    primary: Path
    cached: Path | None = None
