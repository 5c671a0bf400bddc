"""Which layers of a deep teacher a shallower student begins with."""

from __future__ import annotations


def evenly_spaced(num_kept: int, num_blocks: int) -> list[int]:
    """The kept block numbers, first and last among them when at least two are kept."""
    if num_kept == 1:
        return [0]
    return [round(place * (num_blocks - 1) / (num_kept - 1)) for place in range(num_kept)]
