"""Which checkpoint has the lowest loss on held-out data: the file `best` beside the checkpoints."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from distiller.storage.durable_writes import write_durably

BEST_FILE = "best"


@final
@dataclass(frozen=True)
class Best:
    """A checkpoint's step, and the loss on held-out data that was measured there."""

    step: int
    loss: float

    def write(self, checkpoints: Path) -> None:
        """Into the folder of the checkpoints."""
        write_durably(checkpoints / BEST_FILE, json.dumps(asdict(self)) + "\n")


def read_best(checkpoints: Path) -> Best | None:
    """The best of the checkpoints in a folder; None where none was measured, or where it is there no more."""
    try:
        content = json.loads((checkpoints / BEST_FILE).read_text(encoding="utf-8"))
        best = Best(int(content["step"]), float(content["loss"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return best if math.isfinite(best.loss) and (checkpoints / f"step-{best.step}").is_dir() else None
