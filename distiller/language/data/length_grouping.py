"""Batches of rows with similar lengths for evaluation, so that there is little padding."""

from __future__ import annotations

from collections.abc import Sequence

from distiller.language.data.batch import padded_length


def batches_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Batches of row indices, the longest rows first, so that a batch too large for memory fails at once.

    Args:
        lengths: tokens of every row.
        max_tokens: tokens of a batch, at most, padding included; a row that is longer is a batch of its own.
    """
    batches: list[list[int]] = []
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    for row in longest_first:
        if batches and padded_length(lengths[batches[-1][0]]) * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches
