"""When a checkpoint is due."""

from __future__ import annotations

from distiller.config.recipe import Checkpoint


def is_time(settings: Checkpoint, elapsed_s: float) -> bool:
    """Whether one is due by the clock, `elapsed_s` seconds after the last save or the loop's start."""
    return settings.every_minutes is not None and elapsed_s >= 60 * settings.every_minutes


def is_due(settings: Checkpoint, step: int, last_step: int, by_clock: bool) -> bool:
    """Whether to save after update `step`; the same on every rank if `by_clock`, which is `is_time` of rank 0, is."""
    if step == last_step:
        return settings.at_end
    return by_clock or (settings.every_steps is not None and step % settings.every_steps == 0)
