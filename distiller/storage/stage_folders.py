"""Where the folders of the stages before the loop are looked for, and where they are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

CACHED_STAGES = "stages"
"""The subfolder of a cache's folder with the stages that its outputs belong to."""


@final
@dataclass(frozen=True)
class StageFolders:
    """The run's own folder of stages, and another one whose finished stages are read where the own one has none.

    Attributes:
        own: where stages are made.
        cached: that of the cache which the recipe names; never written by a stage.
    """

    own: Path
    cached: Path | None = None
