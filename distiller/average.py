"""The moving average of the student's weights, in pieces: every rank averages what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from distiller.optim import average_unless
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
