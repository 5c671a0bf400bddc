"""The moving average of the student's weights, in pieces: every rank averages what it holds."""

# Names that the libraries import lazily, or from C, without exporting them in their stubs.
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from distiller.student_state.base import Piece, StudentState


class MovingAverage:
    """Exponential moving average of the float32 weights, beside each rank's pieces of them, on their device.

    average <- decay * average + (1 - decay) * weights after every update; it starts from the first weights. Buffers
    are averaged too where they are floating-point, else taken as they are.
    """

    def __init__(self, state: StudentState, decay: float) -> None:
        self._state, self._decay = state, decay
        self._pieces = [replace(piece, values=piece.values.detach().clone()) for piece in state.pieces("weights")]

    def update(self, is_skipped: Tensor) -> None:
        """Takes one update's weights in, unless it was skipped (1 in a float32 scalar on the device).

        Does not communicate, but for what is not trained under ZeRO-3.
        """
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        for mine, theirs in zip(self._pieces, self._state.pieces("weights"), strict=True):
            if not mine.values.is_floating_point():
                mine.values.copy_(theirs.values)
            elif theirs.is_lasting:
                averages.append(mine.values)
                weights.append(theirs.values.detach())
            else:
                self._take([mine.values], [theirs.values.detach()], is_skipped)
        if averages:
            # One fused kernel over all of a device and dtype: a small student's update would else be all launches.
            self._take(averages, weights, is_skipped)

    def pieces(self) -> Iterator[Piece]:
        """This rank's pieces, with the names and starts of the weights'."""
        yield from self._pieces

    def load(self, read: Callable[[str, int, int], Tensor]) -> None:
        """Continues from a saved average; `read` gives (name, first element, number of elements)."""
        for piece in self._pieces:
            piece.values.copy_(read(piece.name, piece.start, len(piece.values)))

    def _take(self, averages: list[Tensor], weights: list[Tensor], is_skipped: Tensor) -> None:
        average_unless(averages, weights, 1 - self._decay, is_skipped)


def average_unless(averages: Sequence[Tensor], values: Sequence[Tensor], weight: float, is_skipped: Tensor) -> None:
    """averages <- averages + weight * (values - averages), but where `is_skipped` (a float32 scalar) is 1.

    Each pair is of one device and one floating dtype; pairs may differ, as where an engine keeps a part on the host.

    SGD that ascends `values` with a weight decay of 1 is that formula, bit for bit, and its fused kernel is the one
    that takes a flag from the device; torch's lerp takes none.
    """
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for average, value in zip(averages, values, strict=True):
        ours, theirs = groups.setdefault((average.device, average.dtype), ([], []))
        ours.append(average)
        theirs.append(value)
    for (device, _), (ours, theirs) in groups.items():
        torch._fused_sgd_(
            ours,
            theirs,
            [],
            lr=weight,
            weight_decay=1.0,
            maximize=True,
            momentum=0.0,
            dampening=0.0,
            nesterov=False,
            is_first_step=False,
            # Blocking: a kernel on the CPU would read it before it arrives.
            found_inf=is_skipped.to(device),
        )
