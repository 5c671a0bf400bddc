"""A micro-batch of token sequences, and the rows that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

IGNORED = -100
"""The label of a position from which nothing is learnt."""

ROW_MULTIPLE = 8
"""Rows are padded to a multiple of this: the matrix units of GPUs want it, and fewer shapes are compiled."""


@final
@dataclass(frozen=True)
class TokenSample:
    """One row, int64 on the CPU, each [L]; see `LanguageBatch` for the meaning of each tensor."""

    sample_id: int
    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor


@final
@dataclass(frozen=True)
class LanguageBatch:
    """One micro-batch, padded on the right. Tensors are int64 [B, L]; L is a multiple of 8.

    No attention mask travels: under causal attention a real token never sees the padding on its right, and
    transformers, when it is given no mask and no cache, reads from `position_ids` where one document of a row ends and
    the next begins. Padding goes on with the last document, so that rows of one document each need no mask at all,
    and GPUs run their fastest kernels.

    Attributes:
        sample_ids: the rows' places in the data.
        input_ids: tokens; the tokenizer's pad id in the padding.
        position_ids: starts again at 0 with every document of a packed row; below `padded_length` of the longest row.
        labels: the token that follows each position, or IGNORED where nothing is learnt: padding, prompts, the last
            token of a document.
        lengths: real tokens of each row, on the host.
    """

    sample_ids: tuple[int, ...]
    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    lengths: tuple[int, ...]

    def map(self, change: Callable[[Tensor], Tensor]) -> LanguageBatch:
        """The batch with every tensor changed."""
        return replace(
            self,
            input_ids=change(self.input_ids),
            position_ids=change(self.position_ids),
            labels=change(self.labels),
        )

    def pin_memory(self) -> LanguageBatch:
        """Called by the DataLoader: page-locked memory, from which copies to a GPU do not block."""
        return self.map(Tensor.pin_memory)


def count(batch: LanguageBatch) -> int:
    """The positions that are learnt from: what a sum of token losses is divided by. Wants the batch on the CPU."""
    return int((batch.labels != IGNORED).sum())


def tokens(batch: LanguageBatch) -> int:
    """Real tokens, without padding: what is worked on, for throughput."""
    return sum(batch.lengths)


def padded_length(length: int) -> int:
    """The length of a batch whose longest row has so many tokens."""
    return max(-(-length // ROW_MULTIPLE), 1) * ROW_MULTIPLE


def collate(samples: Sequence[TokenSample], pad_id: int) -> LanguageBatch:
    """Pads rows to their longest, rounded up to a multiple of 8, on the CPU."""
    lengths = tuple(len(sample.input_ids) for sample in samples)
    shape = len(samples), padded_length(max(lengths))
    input_ids = torch.full(shape, pad_id)
    position_ids = torch.arange(shape[1]).repeat(shape[0], 1)
    labels = torch.full(shape, IGNORED)
    for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        input_ids[row, :length] = sample.input_ids
        position_ids[row, :length] = sample.position_ids
        position_ids[row, length:] += int(sample.position_ids[-1]) + 1 - length
        labels[row, :length] = sample.labels
    return LanguageBatch(tuple(sample.sample_id for sample in samples), input_ids, position_ids, labels, lengths)
