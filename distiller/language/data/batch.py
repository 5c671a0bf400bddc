"""Rows of tokens, and micro-batches of them, with and without their loss mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

IGNORED = -100
"""The label of a position from which nothing is learnt."""

ROW_MULTIPLE = 8
"""Rows are padded to a multiple of so many tokens: GPUs multiply such shapes faster, and fewer shapes are compiled."""


@final
@dataclass(frozen=True)
class TokenSample:
    """One row of L tokens: int64 tensors [L] on the CPU; see `LanguageBatch` for their meaning."""

    sample_id: int
    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor


@final
@dataclass(frozen=True)
class LanguageBatch:
    """One micro-batch of rows, padded on the right. Tensors are int64 [B, L] on any device; L is a multiple of 8.

    There is no attention mask. Under causal attention a token never sees the padding on its right. Without a mask and a
    cache, transformers finds the boundaries between the documents of a row in `position_ids`. The padding continues the
    positions of the last document, so that rows of one document each have no boundary, need no mask at all, and run the
    fastest attention kernels.

    Attributes:
        sample_ids: the rows' indices in the data set.
        input_ids: token ids; the tokenizer's pad id in the padding.
        position_ids: starts again at 0 with every document of a packed row; below `padded_length` of the longest row.
        labels: the token that follows each position, or IGNORED where nothing is learnt: padding, prompts, the last
            token of a document.
        lengths: tokens of each row without padding.
    """

    sample_ids: tuple[int, ...]
    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    lengths: tuple[int, ...]

    def map(self, change: Callable[[Tensor], Tensor]) -> LanguageBatch:
        """The batch with `change` applied to every tensor."""
        return replace(
            self,
            input_ids=change(self.input_ids),
            position_ids=change(self.position_ids),
            labels=change(self.labels),
        )

    def pin_memory(self) -> LanguageBatch:
        """The batch in page-locked memory, from which copies to a GPU need not block. Called by the DataLoader."""
        return self.map(Tensor.pin_memory)


def padded_length(length: int) -> int:
    """Tokens of each row, padding included, in a batch whose longest row has `length` tokens; at least 8."""
    return max(-(-length // ROW_MULTIPLE), 1) * ROW_MULTIPLE


def collate(samples: Sequence[TokenSample], pad_id: int) -> LanguageBatch:
    """Pads rows on the right to the longest of them, rounded up to a multiple of 8. Runs on the CPU."""
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


@final
@dataclass(frozen=True)
class MaskedBatch:
    """A micro-batch of the training loop: its tensors on any device, its loss mask on the CPU.

    Attributes:
        batch: the rows.
        loss_mask: [B L] bool, on the CPU: which positions are learnt. On a GPU, the host would have to wait to count
            them.
        num_learnt: how many entries of `loss_mask` are true.
    """

    batch: LanguageBatch
    loss_mask: Tensor
    num_learnt: int

    @staticmethod
    def of(samples: Sequence[TokenSample], pad_id: int) -> MaskedBatch:
        """Collates rows on the CPU; see `collate`."""
        batch = collate(samples, pad_id)
        loss_mask = (batch.labels != IGNORED).flatten()
        return MaskedBatch(batch, loss_mask, int(loss_mask.sum()))

    def pin_memory(self) -> MaskedBatch:
        """The batch and its mask in page-locked memory. Called by the DataLoader."""
        return replace(self, batch=self.batch.pin_memory(), loss_mask=self.loss_mask.pin_memory())
