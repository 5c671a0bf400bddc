"""Numbers as a reader sees them, and series that are short enough to draw or to read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, TypeGuard

MAX_POINTS = 2000
"""Points of a drawn line."""


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def shown(value: Any) -> str:
    """A value in a table: four significant digits, thousands separated; a dash for None."""
    if value is None:
        return "–"  # noqa: RUF001
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    return str(value)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as far as they matter."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{seconds:.1f} s"


def median_of(values: Sequence[float]) -> float | None:
    """The median, or None of nothing."""
    return median(values) if values else None


def thinned(count: int, limit: int) -> list[int]:
    """At most `limit` (2 or more) evenly spaced indices below `count`, the first and the last among them."""
    if count <= limit:
        return list(range(count))
    return sorted({round(place * (count - 1) / (limit - 1)) for place in range(limit)})


def extremes(values: Sequence[float | None], limit: int = MAX_POINTS) -> list[int]:
    """Indices of at most `limit` points that keep the lowest and the highest of every stretch, and both ends.

    A spike of a single update is seen in the drawing of a long run.
    """
    count = len(values)
    if count <= limit:
        return list(range(count))
    kept, stretch = {0, count - 1}, math.ceil(2 * count / (limit - 2))
    for first in range(0, count, stretch):
        numbers = [
            (value, place)
            for place in range(first, min(first + stretch, count))
            if (value := values[place]) is not None
        ]
        if numbers:
            kept |= {min(numbers)[1], max(numbers)[1]}
    return sorted(kept)


def shortened(text: str, length: int = 48) -> str:
    """The beginning and the end of a long text."""
    return text if len(text) <= length else f"{text[: length // 2]}...{text[3 - length // 2 :]}"
