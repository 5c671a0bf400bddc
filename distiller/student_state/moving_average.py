"""The moving average of the student's weights: every rank averages the pieces that it holds."""

# Names that the libraries import lazily, or from C, without exporting them in their stubs.
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import final

from torch import Tensor
from torch.optim.sgd import sgd

from distiller.student_state.base import Piece, StudentState


@final
class MovingAverage:
    """Exponential moving average of the float32 weights, in pieces like this rank's weights and on the same devices.

    average <- decay * average + (1 - decay) * weights after every update, starting from the initial weights.
    Floating-point buffers are averaged too, other buffers are copied.
    """

    def __init__(self, state: StudentState, decay: float) -> None:
        self._state, self._decay = state, decay
        self._pieces = [replace(piece, values=piece.values.detach().clone()) for piece in state.pieces("weights")]

    def update(self, is_skipped: Tensor) -> None:
        """Adds the weights of one update to the average, unless the update was skipped.

        `is_skipped`: float32 scalar on the device, 1 or 0. Communicates only for frozen parameters under ZeRO-3.
        """
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        for average, piece in zip(self._pieces, self._state.pieces("weights"), strict=True):
            if not average.values.is_floating_point():
                average.values.copy_(piece.values)
            elif piece.is_persistent:
                averages.append(average.values)
                weights.append(piece.values.detach())
            else:
                average_unless([average.values], [piece.values.detach()], 1 - self._decay, is_skipped)
        # One fused kernel for each device and dtype: for a small student, kernel launches take most of the time.
        average_unless(averages, weights, 1 - self._decay, is_skipped)

    def pieces(self) -> Iterator[Piece]:
        """This rank's pieces of the average, with the names and starts of its pieces of the weights."""
        yield from self._pieces

    def load(self, read: Callable[[str, int, int], Tensor]) -> None:
        """Loads a saved average. `read`: (name, first element, number of elements) -> 1-D CPU tensor."""
        for piece in self._pieces:
            piece.values.copy_(read(piece.name, piece.start, len(piece.values)))


def average_unless(averages: list[Tensor], values: list[Tensor], weight: float, is_skipped: Tensor) -> None:
    """averages <- averages + weight * (values - averages) in place, unless `is_skipped` (a float32 scalar) is 1.

    The two tensors of a pair have the same shape, device and floating-point dtype. Pairs may differ from each other,
    since an engine may keep some tensors on the host.

    SGD with `maximize` and a weight decay of 1, where `values` are the gradients, computes this formula bit for bit,
    and its fused kernel reads a flag on the device. `torch._foreach_lerp_` reads its weight on the host, and so waits
    for the GPU; foreach sub, mul and add need temporary memory as large as the weights.
    """
    sgd(
        averages,
        values,
        [None] * len(averages),
        fused=True,
        found_inf=is_skipped,
        lr=weight,
        weight_decay=1.0,
        maximize=True,
        momentum=0.0,
        dampening=0.0,
        nesterov=False,
    )
