"""Says, once, that updates wait for the loader."""

from __future__ import annotations

from typing import final

from distiller.data.loader_processes import cores_of_rank
from distiller.distributed.process import print_to_stderr
from distiller.distributed.ranks import Ranks

MAX_SHARE = 0.05
"""Of an update's time, that it may wait for data without a word."""


@final
class DataWaitNotice:
    """Prints a line on rank 0 the first time that updates wait longer than `MAX_SHARE`. Does not communicate.

    Does nothing where this rank has no core left for another loader process.
    """

    def __init__(self, num_workers: int, ranks: Ranks) -> None:
        """`num_workers`: loader processes of a rank."""
        self._num_workers = num_workers
        self._cores = cores_of_rank(ranks)
        self._is_due = ranks.is_main and self._cores > num_workers + 1

    def check(self, times_ms: dict[str, float]) -> None:
        """`times_ms`: of an update and its parts, as `StepTimer.read` returns them."""
        share = times_ms["data"] / max(times_ms["step"], 1e-9)
        if not self._is_due or share <= MAX_SHARE:
            return
        self._is_due = False
        more = "more" if self._num_workers else "some"
        print_to_stderr(
            f"note: updates wait for data {share:.0%} of their time; {more} loader processes may hide that "
            f"(train.num_workers: this rank has {self._num_workers} of them, and {self._cores} CPU cores)"
        )
