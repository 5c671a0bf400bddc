"""Figures over several seeds: their means under the same names, and their standard deviations beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

SUFFIX = "_std"


def with_spread(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of the reports' figures, and as `NAME_std` the sample standard deviations (divisor N - 1).

    A dict of numbers gets a dict of deviations beside it (`velocity_mse_std`); in a dict of dicts, each inner one holds
    its own. What is no number in every report is taken from the first; so is everything of one report. A figure that
    is a deviation itself gets a mean only.

    Args:
        reports: one of each seed, with the same keys.
    """
    if len(reports) == 1:
        return reports[0]
    merged: dict[str, Any] = {}
    for name, first in reports[0].items():
        values = [report[name] for report in reports]
        if not isinstance(first, dict):
            merged |= _spread_of(name, values)
        elif any(isinstance(value, dict) for value in first.values()):
            merged[name] = {key: with_spread([value[key] for value in values]) for key in first}
        else:
            both = {key: _spread_of(key, [value[key] for value in values]) for key in first}
            merged[name] = {key: spread[key] for key, spread in both.items()}
            merged[f"{name}{SUFFIX}"] = {key: spread[f"{key}{SUFFIX}"] for key, spread in both.items()}
    return merged


def _spread_of(name: str, values: Sequence[Any]) -> dict[str, Any]:
    if not all(isinstance(value, int | float) for value in values):
        return {name: values[0]}
    mean = sum(values) / len(values)
    if name.endswith(SUFFIX):
        return {name: mean}
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return {name: mean, f"{name}{SUFFIX}": math.sqrt(variance)}
