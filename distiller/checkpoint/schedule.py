"""When a checkpoint is due."""

from __future__ import annotations

from distiller.config import Checkpoint


def is_due(settings: Checkpoint, step: int, last_step: int, elapsed_s: float) -> bool:
    """Whether to save after update `step`; the same on every rank if `elapsed_s` is.

    Args:
        elapsed_s: since the last save, or the loop's start, by rank 0's clock; 0 where nobody has looked at it.
    """
    if step == last_step:
        return settings.at_end
    by_step = settings.every_steps is not None and step % settings.every_steps == 0
    return by_step or (settings.every_minutes is not None and elapsed_s >= 60 * settings.every_minutes)
