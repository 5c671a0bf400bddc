"""The interface by which checkpoints, moving average and export read and load the student under any engine.

An engine shards the student's tensors in its own way: not at all (DDP), into ranges of a flat buffer (ZeRO), along the
first dimension (FSDP2). In row-major order each shard is a range of consecutive elements: a piece. The pieces of all
ranks together hold every element once, so a file of pieces can be read under any engine and any number of ranks, and
averaging pieces needs no communication.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor

Kind = Literal["weights", "exp_avg", "exp_avg_sq"]
KINDS: tuple[Kind, ...] = ("weights", "exp_avg", "exp_avg_sq")

Read = Callable[[Kind, str, int, int], Tensor]
"""(kind, tensor's name, first element, number of elements) -> these elements, a 1-D CPU tensor of the stored dtype."""


@final
@dataclass(frozen=True)
class Piece:
    """`values` (1-D) are the elements `start`, `start + 1`, ... of the named tensor in row-major order.

    They are float32 for parameters (the master weights) and moments, in any training precision; a buffer keeps its
    dtype. They may be a view of the engine's live memory, so read or copy them before the next update.

    Attributes:
        is_persistent: `values` stay valid while the engine lives, so that several pieces can be read at once.
    """

    name: str
    start: int
    values: Tensor
    is_persistent: bool = False


@final
@dataclass(frozen=True)
class Counters:
    """The optimizer's state beside the moments.

    Attributes:
        updates: steps that AdamW has taken (its bias correction counts them), without skipped steps.
        loss_scale: fp16's loss scale and the scaler's other numbers; {} without a scaler.
    """

    updates: int
    loss_scale: dict[str, float]


class StudentState(ABC):
    """The prepared student and its optimizer under one engine."""

    @property
    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Unsharded shape of every parameter and saved buffer, in the module's order; a tied tensor once."""

    @abstractmethod
    def pieces(self, kind: Kind) -> Iterator[Piece]:
        """This rank's pieces of one kind; no moments before the first update, nor of frozen parameters.

        Every rank iterates to the end, since some engines communicate. Unless a piece is persistent, its values are
        valid only until the next one is requested. Every call yields the same names, starts and sizes, in the same
        order.
        """

    @abstractmethod
    def counters(self) -> Counters:
        """The optimizer's counters, the same on every rank. May wait for the GPU."""

    @abstractmethod
    def load(self, read: Read, counters: Counters) -> None:
        """Loads a saved state into student and optimizer. Every rank calls it, since some engines communicate.

        `read` returns any range of any tensor; a rank reads only what it holds (under DDP everything). If
        `counters.updates` is 0 there are no moments to read. The next update must equal that of an uninterrupted run:
        bit for bit under the same engine and number of ranks.
        """
