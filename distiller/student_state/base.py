"""What a checkpoint, the moving average and the export see of the student, whatever engine holds it.

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
"""(kind, tensor's name, first element, number of elements) -> 1-D CPU tensor in the stored dtype."""


@final
@dataclass(frozen=True)
class Piece:
    """`values` (1-D) are the elements `start`, `start + 1`, ... of the named tensor in row-major order.

    float32 for parameters and moments, under any training precision (the master weights); its own dtype for a buffer.
    It may be a view of the engine's live memory: read it, or copy it, before the next update.

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
        updates: steps that AdamW has taken (its bias correction counts them), without skipped ones.
        loss_scale: fp16's scale and the scaler's other numbers; {} without a scaler.
    """

    updates: int
    loss_scale: dict[str, float]


class StudentState(ABC):
    """The prepared student and its optimizer under one engine."""

    @property
    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of every parameter and saved buffer, in the module's order; a tied tensor once."""

    @abstractmethod
    def pieces(self, kind: Kind) -> Iterator[Piece]:
        """This rank's pieces of one kind; no moments before the first update, or where nothing is trained.

        Every rank iterates to the end. Unless a piece is persistent, its values are valid only until the next one is
        requested. Every call yields the same names, starts and sizes, in the same order.
        """

    @abstractmethod
    def counters(self) -> Counters:
        """The same on every rank."""

    @abstractmethod
    def load(self, read: Read, counters: Counters) -> None:
        """Loads a saved state into student and optimizer. Every rank calls it.

        `read` returns any range of any tensor; a rank reads only what it holds (DDP: everything). With
        `counters.updates` 0 there are no moments to read. The next update must equal that of an uninterrupted run, bit
        for bit under the same engine and number of ranks.
        """
