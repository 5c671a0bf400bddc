"""A micro-batch as the loop carries it: what of it counts stays on the host, wherever the rest goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from torch import Tensor

from distiller.language.data.batch import IGNORED, LanguageBatch, TokenSample, collate


@final
@dataclass(frozen=True)
class CountedBatch:
    """A micro-batch, and which of its positions are learnt.

    Attributes:
        counts: [B L] bool, on the CPU: a GPU would have to be waited for to learn how many they are.
        num_counted: how many of them are true.
    """

    batch: LanguageBatch
    counts: Tensor
    num_counted: int

    @staticmethod
    def of(samples: Sequence[TokenSample], pad_id: int) -> CountedBatch:
        """Collates on the CPU."""
        batch = collate(samples, pad_id)
        counts = (batch.labels != IGNORED).flatten()
        return CountedBatch(batch, counts, int(counts.sum()))

    def pin_memory(self) -> CountedBatch:
        """Called by the DataLoader."""
        return replace(self, batch=self.batch.pin_memory(), counts=self.counts.pin_memory())
