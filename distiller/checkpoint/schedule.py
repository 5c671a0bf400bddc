"""When a checkpoint is due, and how many there are."""

from __future__ import annotations

from distiller.config.recipe import Checkpoint


def is_time(settings: Checkpoint, elapsed_s: float) -> bool:
    """Whether a checkpoint is due by time, `elapsed_s` seconds after the last save or the loop's start."""
    return settings.every_minutes is not None and elapsed_s >= 60 * settings.every_minutes


def is_periodic(settings: Checkpoint) -> bool:
    """Whether checkpoints are saved before the run's end."""
    return settings.every_steps is not None or settings.every_minutes is not None or settings.keep_best


def most_at_once(settings: Checkpoint) -> int:
    """How many checkpoints are on the disk at a time: those that are kept, and the one that is being written."""
    if is_periodic(settings):
        return settings.keep + settings.keep_best + 1
    return int(settings.at_end)


def is_due(settings: Checkpoint, step: int, last_step: int, by_clock: bool) -> bool:
    """Whether to save after update `step`; the same on every rank, since `by_clock` is rank 0's `is_time`."""
    if step == last_step:
        return settings.at_end
    return by_clock or (settings.every_steps is not None and step % settings.every_steps == 0)
