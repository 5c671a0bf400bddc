"""The teacher of a loss over tokens: hidden states, logits or a sparse target; and its rows for one chunk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from distiller.language.loss.divergence_values import SparseTarget
from distiller.language.model.logits import PLAIN, Head, LogitChange, product_width


class HiddenTarget(NamedTuple):
    """The teacher as last hidden states and output layer; logits are made in the layer's dtype, without autocast."""

    hidden: Tensor
    """[N, H'], any floating dtype."""

    weight: Tensor
    """[V', H'], floating."""

    bias: Tensor | None = None
    """[V'], the weight's dtype."""

    change: LogitChange = PLAIN
    """The scale and cap that the teacher applies to the layer's logits."""

    @staticmethod
    def of(hidden: Tensor, head: Head) -> HiddenTarget:
        """The target of hidden states [N, H'], with the teacher's output layer."""
        return HiddenTarget(hidden, head.weight, head.bias, head.change)


class LogitsTarget(NamedTuple):
    """The teacher as logits, scaled and capped as the model itself returns them."""

    logits: Tensor
    """[N, V'], any floating dtype."""


Target = HiddenTarget | LogitsTarget | SparseTarget


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, height: int) -> Tensor:
    """hidden @ weight.t() + bias in the first rows of a tensor [height, V]; the other rows are uninitialised."""
    logits = hidden.new_empty(height, weight.shape[0])
    out = logits[: len(hidden)]
    if bias is None:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)
    return logits


def teacher_rows(
    target: Target, rows: Tensor, padded_rows: Tensor, height: int, num_shared: int
) -> Tensor | SparseTarget:
    """The teacher of one chunk, with `height` rows: logits, or a sparse target.

    Logits are over the first `num_shared` ids, or over all where the teacher has fewer. An output layer gives some
    further ids, as `product_width` says.

    Args:
        rows, padded_rows: indices of the chunk's tokens, without padding [n] and with padding [height]; int64.
    """
    if isinstance(target, SparseTarget):
        return target.rows(padded_rows)
    if isinstance(target, LogitsTarget):
        return target.logits[padded_rows, :num_shared]
    width = product_width(num_shared, len(target.weight))
    weight = target.weight[:width]
    bias = None if target.bias is None else target.bias[:width]
    return logits_of(target.hidden[rows].to(weight.dtype), weight, bias, height)
