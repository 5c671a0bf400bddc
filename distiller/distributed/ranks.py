"""This process among the others, and what they tell each other from host to host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distiller.errors import AgreedError, AgreedUserError, UserError

PATIENCE = timedelta(days=20)
"""How long a rank waits for another one that lives: no time is too long to read weights or to draw a rollout.

Milliseconds of it still fit 32 bits. One that dies closes its connections, which ends the wait at once.
"""
_POLL_S = 0.05


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run, and of this node. `everyone` and `node` are gloo groups; None when a rank is alone there."""

    device: torch.device
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    everyone: dist.ProcessGroup | None
    node: dist.ProcessGroup | None

    @staticmethod
    def join(device: torch.device) -> Ranks:
        """Reads the launcher's environment and makes the groups. Communicates."""
        if not dist.is_initialized():
            return Ranks(device, 0, 1, 0, 1, None, None)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        # DeepSpeed's own launcher has another name for it.
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world_size)
        first = rank - int(os.environ.get("LOCAL_RANK", rank))
        everyone = node = None
        if world_size > 1:
            everyone = dist.new_group(backend="gloo", timeout=PATIENCE)
        # Every rank takes part in making every group.
        for start in range(0, world_size, local_world_size):
            members = list(range(start, min(start + local_world_size, world_size)))
            group = dist.new_group(members, backend="gloo", timeout=PATIENCE) if len(members) > 1 else None
            if rank in members:
                node = group
        return Ranks(device, rank, world_size, rank - first, local_world_size, everyone, node)

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
        """The number, among all ranks, of the node's first."""
        return self.rank - self.local_rank

    def alone(self) -> Ranks:
        """This process by itself, for what the others take no part in."""
        return Ranks(self.device, 0, 1, 0, 1, None, None)

    def new_node_group(self) -> dist.ProcessGroup:
        """A group of the node's ranks of its own, for tensors on `device`. Communicates; every rank calls it."""
        starts = range(0, self.world_size, self.local_world_size)
        members = [list(range(start, min(start + self.local_world_size, self.world_size))) for start in starts]
        groups = [dist.new_group(ranks) for ranks in members]
        own = groups[self.rank // self.local_world_size]
        assert isinstance(own, dist.ProcessGroup)
        return own

    def wait(self) -> None:
        """Waits for all ranks, however long they take. Communicates."""
        if self.everyone is not None:
            dist.barrier(self.everyone)

    def wait_for_hours(self) -> None:
        """As `wait`, and signals to this process are heard meanwhile. Communicates."""
        if self.everyone is not None:
            work = dist.barrier(self.everyone, async_op=True)
            assert work is not None
            while not work.is_completed():
                time.sleep(_POLL_S)
            work.wait()

    def wait_on_node(self) -> None:
        """Waits for the node's ranks. Communicates."""
        if self.node is not None:
            dist.barrier(self.node)

    def from_main(self, make: Callable[[], Any]) -> Any:
        """What rank 0 makes, on every rank; so is its failure. Small plain values only. Communicates."""
        return _shared(self.everyone, 0, self.is_main, make)

    def print(self, text: str) -> None:
        """Prints on rank 0."""
        if self.is_main:
            print(text)

    def from_local_main(self, make: Callable[[], Any]) -> Any:
        """What the node's first rank makes, on each of its ranks; so is its failure. Communicates."""
        return _shared(self.node, self.first_on_node, self.is_local_main, make)

    def gather_on_node(self, value: Any) -> list[Any]:
        """A small plain value of every rank of the node, in rank order. Communicates."""
        return _gathered(self.node, value)

    def gather(self, value: Any) -> list[Any]:
        """A small plain value of every rank, in rank order. Communicates."""
        return _gathered(self.everyone, value)

    def all_succeed(self, action: Callable[[], Any]) -> Any:
        """Runs something on every rank; where it fails on one, it fails on all. Communicates."""
        result, error = None, None
        try:
            result = action()
        except Exception as caught:
            error = caught
        failed = [(rank, text) for rank, text in enumerate(self.gather(_described(error))) if text is not None]
        if failed:
            _raise(*failed[0][1], rank=failed[0][0] if self.world_size > 1 else None, cause=error)
        return result


def _gathered(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def _shared(group: dist.ProcessGroup | None, source: int, is_source: bool, make: Callable[[], Any]) -> Any:
    outcome: list[Any] = [None, None]
    error = None
    if is_source:
        try:
            outcome[0] = make()
        except Exception as caught:
            error, outcome[1] = caught, _described(caught)
    if group is not None:
        dist.broadcast_object_list(outcome, source, group)
    if outcome[1] is not None:
        _raise(*outcome[1], rank=source if group is not None else None, cause=error)
    return outcome[0]


def _described(error: Exception | None) -> tuple[bool, str] | None:
    if error is None:
        return None
    text = str(error) if isinstance(error, UserError | AgreedError) else f"{type(error).__name__}: {error}"
    return isinstance(error, UserError), " ".join(text.split())


def _raise(is_users: bool, text: str, rank: int | None, cause: Exception | None) -> None:
    if is_users:
        raise AgreedUserError(text) from cause
    raise AgreedError(text if rank is None else f"rank {rank}: {text}") from cause
