"""Rows for evaluation: batches of like lengths, so that little is padding, and results in the rows' own order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from distiller.language.data.batch import padded_length

ResultT = TypeVar("ResultT")


def batches_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows' numbers in batches, the longest rows first: what does not fit into memory fails at once.

    Args:
        lengths: tokens of every row.
        max_tokens: of a batch, padding included; a row that is longer is a batch of its own.
    """
    batches: list[list[int]] = []
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    for row in longest_first:
        if batches and padded_length(lengths[batches[-1][0]]) * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def in_rows_order(batches: Sequence[Sequence[int]], results: Sequence[Sequence[ResultT]]) -> list[ResultT]:
    """One result a row, batch by batch, into the order of the rows."""
    pairs = [pair for batch, part in zip(batches, results, strict=True) for pair in zip(batch, part, strict=True)]
    return [result for _, result in sorted(pairs, key=lambda pair: pair[0])]
