"""What a run was predicted to take, beside what it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import final

import torch

from distiller.distributed.process import print_to_stderr
from distiller.distributed.ranks import Ranks
from distiller.training.tracking import GIB

SETTLED, COMPARED = 10, 20
"""Updates of a session after which time is measured, and after which it is compared."""
NOTABLE = 0.10
"""From this relative difference on, it is said that a prediction was off."""


@final
@dataclass(frozen=True)
class Expectation:
    """Of one rank: peak of allocated GPU memory in bytes, and milliseconds of an update (None where not predicted)."""

    peak_bytes: int
    step_ms: float | None


@final
class ExpectationNotice:
    """Compares memory and time with what was predicted, once a session. Does not communicate."""

    def __init__(
        self,
        expected: Expectation | None,
        ranks: Ranks,
        first_step: int,
        peak_bytes: Callable[[], int] = torch.cuda.max_memory_allocated,
    ) -> None:
        """`expected`: None where nothing was predicted; `first_step`: the session's first update."""
        self._expected = expected if ranks.is_main else None
        self._first_step, self._peak_bytes = first_step, peak_bytes
        self._ends: list[float] = []

    def end(self, step: int) -> None:
        """After update `step`; on rank 0 the twentieth of a session prints a line."""
        if self._expected is None:
            return
        count = step - self._first_step + 1
        if SETTLED <= count <= COMPARED:
            self._ends.append(time.perf_counter())
        if count == COMPARED:
            # The median leaves out an update beside which a checkpoint is written.
            step_ms = 1e3 * median(later - earlier for earlier, later in pairwise(self._ends))
            print_to_stderr(comparison(self._expected, Expectation(self._peak_bytes(), step_ms), step))


def comparison(expected: Expectation, measured: Expectation, step: int) -> str:
    """One line; it says so where a prediction was off by more than a tenth."""
    parts = [f"GPU peak {measured.peak_bytes / GIB:.2f} GiB, predicted {expected.peak_bytes / GIB:.2f}"]
    off = ["memory"] if _is_off(expected.peak_bytes, measured.peak_bytes) else []
    if expected.step_ms is not None and measured.step_ms is not None:
        parts.append(f"{measured.step_ms:,.0f} ms an update, predicted {expected.step_ms:,.0f}")
        off += ["time"] if _is_off(expected.step_ms, measured.step_ms) else []
    said = f"; the prediction of {' and '.join(off)} is off by more than {NOTABLE:.0%}" if off else ""
    return f"update {step}: {', '.join(parts)}{said}"


def _is_off(expected: float, measured: float) -> bool:
    return abs(expected - measured) > NOTABLE * measured
