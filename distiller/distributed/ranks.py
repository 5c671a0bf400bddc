"""The ranks of a run: barriers and exchange of small Python values between them, over gloo."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast, final

import torch
import torch.distributed as dist

from distiller.errors import AgreedError, AgreedUserError, RunError, UserError

PATIENCE = timedelta(days=20)
"""Time limit of gloo's collectives. Reading weights or drawing a rollout may take a rank days.

Its milliseconds fit 32 bits. A rank that dies closes its connections, which ends the others' wait at once.
"""
_POLL_S = 0.05

T = TypeVar("T")


@final
@dataclass(frozen=True)
class Ranks:
    """This process's place among the run's ranks and among its node's.

    Attributes:
        device: this rank's.
        world_group: gloo group of all ranks; None with one rank.
        node_group: gloo group of this node's ranks; None with one rank on the node.
    """

    device: torch.device
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    world_group: dist.ProcessGroup | None
    node_group: dist.ProcessGroup | None

    @staticmethod
    def join(device: torch.device) -> Ranks:
        """Reads the launcher's environment and makes the groups. Communicates."""
        if not dist.is_initialized():
            return Ranks(device, 0, 1, 0, 1, None, None)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        # DeepSpeed's own launcher has another name for it.
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world_size)
        first = rank - int(os.environ.get("LOCAL_RANK", rank))
        world_group = node_group = None
        if world_size > 1:
            world_group = _new_gloo_group(None)
        # Every rank takes part in making every group.
        for start in range(0, world_size, local_world_size):
            members = list(range(start, min(start + local_world_size, world_size)))
            group = _new_gloo_group(members) if len(members) > 1 else None
            if rank in members:
                node_group = group
        return Ranks(device, rank, world_size, rank - first, local_world_size, world_group, node_group)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0 of all."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.local_rank == 0

    @property
    def first_on_node(self) -> int:
        """The rank, among all, of the node's first."""
        return self.rank - self.local_rank

    def as_single_process(self) -> Ranks:
        """The same device as the only rank, for work in which the other ranks take no part."""
        return Ranks(self.device, 0, 1, 0, 1, None, None)

    def new_device_group(self) -> dist.ProcessGroup:
        """A new group of all ranks, for tensors on `device`. Communicates; there are several ranks, and all call it.

        On GPUs it has a stream of its own: what waits in it does not delay the default group's all-reduces.
        """
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        return group

    def new_node_group(self) -> dist.ProcessGroup:
        """A new group of the node's ranks, for tensors on `device`. Communicates; every rank calls it."""
        starts = range(0, self.world_size, self.local_world_size)
        members = [list(range(start, min(start + self.local_world_size, self.world_size))) for start in starts]
        groups = [dist.new_group(ranks) for ranks in members]
        group = groups[self.rank // self.local_world_size]
        assert isinstance(group, dist.ProcessGroup)
        return group

    def barrier(self) -> None:
        """Waits for all ranks; signal handlers do not run meanwhile. Communicates."""
        if self.world_group is not None:
            dist.barrier(self.world_group)

    def interruptible_barrier(self) -> None:
        """Waits for all ranks, and lets Python run signal handlers meanwhile; for long work. Communicates."""
        if self.world_group is not None:
            work = dist.barrier(self.world_group, async_op=True)
            assert work is not None
            while not work.is_completed():
                time.sleep(_POLL_S)
            work.wait()

    def node_barrier(self) -> None:
        """Waits for the node's ranks. Communicates."""
        if self.node_group is not None:
            dist.barrier(self.node_group)

    def broadcast_from_main(self, make: Callable[[], T]) -> T:
        """Calls `make` on rank 0 and returns its result on every rank. Small values that pickle. Communicates.

        Raises:
            AgreedUserError: `make` raised a UserError; on every rank.
            AgreedError: it raised anything else; on every rank.
        """
        return _broadcast(self.world_group, 0, self.is_main, make)

    def print(self, text: str) -> None:
        """Prints on rank 0."""
        if self.is_main:
            print(text)

    def broadcast_from_local_main(self, make: Callable[[], T]) -> T:
        """As `broadcast_from_main`, on this node: the result of its first rank. Communicates."""
        return _broadcast(self.node_group, self.first_on_node, self.is_local_main, make)

    def gather_on_node(self, value: T) -> list[T]:
        """A small value of every rank of the node, in rank order. Communicates."""
        return _gather(self.node_group, value)

    def gather(self, value: T) -> list[T]:
        """A small value of every rank, in rank order. Communicates."""
        return _gather(self.world_group, value)

    def all_succeed(self, action: Callable[[], T]) -> T:
        """Runs `action` on every rank and returns its own result; a failure on one rank is raised on all. Communicates.

        Raises:
            AgreedUserError: the first rank that failed raised a UserError.
            AgreedError: it raised anything else.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as caught:
            error = caught
        failures = self.gather(_failure_of(error))
        failed = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
        if failed:
            rank, failure = failed[0]
            raise failure.agreed(rank if self.world_size > 1 else None) from error
        return cast("T", result)


@final
@dataclass(frozen=True)
class _Failure:
    """An exception as it travels between ranks: its text in one line, and whether it was a UserError."""

    text: str
    is_user_error: bool

    def agreed(self, rank: int | None) -> AgreedUserError | AgreedError:
        """The exception that every rank raises; `rank` is named in it, unless it is None."""
        if self.is_user_error:
            return AgreedUserError(self.text)
        # A failure that ranks of a node have agreed on before names its rank already.
        is_named = rank is None or self.text.startswith("rank ")
        return AgreedError(self.text if is_named else f"rank {rank}: {self.text}")


def _new_gloo_group(members: list[int] | None) -> dist.ProcessGroup | None:
    """A group of these ranks (None: all); None on ranks outside of it. Communicates; every rank calls it."""
    group = dist.new_group(members, backend="gloo", timeout=PATIENCE)
    return group if isinstance(group, dist.ProcessGroup) else None


def _failure_of(error: Exception | None) -> _Failure | None:
    if error is None:
        return None
    text = str(error) if isinstance(error, UserError | RunError) else f"{type(error).__name__}: {error}"
    return _Failure(" ".join(text.split()), isinstance(error, UserError))


def _gather(group: dist.ProcessGroup | None, value: T) -> list[T]:
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def _broadcast(group: dist.ProcessGroup | None, source: int, is_source: bool, make: Callable[[], T]) -> T:
    outcome: list[Any] = [None, None]
    error = None
    if is_source:
        try:
            outcome[0] = make()
        except Exception as caught:
            error, outcome[1] = caught, _failure_of(caught)
    if group is not None:
        dist.broadcast_object_list(outcome, source, group)
    result, failure = outcome
    if failure is not None:
        raise failure.agreed(source if group is not None else None) from error
    return result
