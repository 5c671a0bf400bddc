"""Notices that another rank has died between two pieces of long work, without waiting for one that is slower."""

from __future__ import annotations

from typing import final

import torch.distributed as dist

from distiller.distributed.ranks import Ranks


@final
class LivenessBarrier:
    """Barriers that nobody waits for: one of them fails as soon as a rank that has not come to it is dead.

    For work that every rank does in as many pieces, which may be files of its own: without it the others would find
    out at the end. Over gloo, from host to host.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._group, self._open = ranks.everyone, list[dist.Work]()

    def arrive(self) -> None:
        """Every rank calls it before each piece. The library's RuntimeError where a rank is dead. Communicates."""
        if self._group is None:
            return
        for work in [work for work in self._open if work.is_completed()]:
            work.wait()
            self._open.remove(work)
        work = dist.barrier(self._group, async_op=True)
        assert work is not None
        self._open.append(work)
