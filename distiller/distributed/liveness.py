"""Detects during long work that another rank has died, without waiting for slower ranks."""

from __future__ import annotations

from typing import final

import torch.distributed as dist

from distiller.distributed.ranks import Ranks


@final
class LivenessBarrier:
    """Asynchronous barriers that are polled, not awaited: one fails when a rank dies before it has reached it.

    For work that every rank does in the same number of pieces, such as reading files: without it a death would be
    noticed only at the end. Over gloo.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._group, self._pending = ranks.world_group, list[dist.Work]()

    def arrive(self) -> None:
        """Every rank calls it before each piece. Raises torch's RuntimeError where a rank is dead. Communicates."""
        if self._group is None:
            return
        for work in [work for work in self._pending if work.is_completed()]:
            work.wait()
            self._pending.remove(work)
        work = dist.barrier(self._group, async_op=True)
        assert work is not None
        self._pending.append(work)
