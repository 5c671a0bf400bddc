"""What a checkpoint, the moving average and the export see of the student, whatever engine holds it.

An engine cuts the student's tensors in its own way: not at all (DDP), into runs of a flat buffer (ZeRO), along the
first dimension (FSDP2). In the order of its memory each of these is a run of consecutive elements, so that is the one
unit here. Pieces of all ranks together hold every element once: a file of pieces can be read back under any engine and
any number of ranks, and an average over pieces needs no communication.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Kind = Literal["weights", "exp_avg", "exp_avg_sq"]
KINDS: tuple[Kind, ...] = ("weights", "exp_avg", "exp_avg_sq")

Read = Callable[[Kind, str, int, int], Tensor]
"""(kind, tensor's name, first element, number of elements) -> 1-D CPU tensor in the stored dtype."""


@dataclass(frozen=True)
class Piece:
    """`values` (1-D) are the elements `start`, `start + 1`, ... of the named tensor in row-major order.

    float32 for parameters and moments, under any training precision (the master weights); its own dtype for a buffer.
    It may be a view of the engine's live memory: read it, or copy it, before the next update.

    Attributes:
        is_lasting: the memory stays where it is while the engine lives, so that several pieces can be read at once.
    """

    name: str
    start: int
    values: Tensor
    is_lasting: bool = False


@dataclass(frozen=True)
class Counters:
    """The state of the optimizer that is not a tensor of the student.

    Attributes:
        updates: steps that AdamW has really taken (its bias correction); skipped ones are not counted.
        loss_scale: fp16's scale and the scaler's other numbers, {} where there is no scaler.
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
        """This rank's share of one kind; none of the moments before the first update, or where nothing is trained.

        Every rank iterates to the end. Unless a piece is lasting, its values are only valid until the next one is asked
        for. The share is the same at every call: same names, starts and sizes, in the same order.
        """

    @abstractmethod
    def counters(self) -> Counters:
        """The same on every rank."""

    @abstractmethod
    def load(self, read: Read, counters: Counters) -> None:
        """Puts a saved state into student and optimizer, as if they had trained to there. Every rank calls it.

        `read` gives any run of any tensor; a rank asks for what it holds and no more (DDP: for everything). With
        `counters.updates` 0 there are no moments to read. The next update must be the one that an unbroken run would
        have made, bit for bit under the same engine and number of ranks.
        """
