"""A cache as a training run reads it: by sample, in loader processes, from mapped memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch.utils.data import Dataset

from distiller.cache.layout import Layout, shard_name
from distiller.cache.shards import Shard
from distiller.data.order import SampleKey
from distiller.errors import RunError, UserError
from distiller.tasks.interfaces import Cacheable
from distiller.tasks.micro_batch import MicroBatch
from distiller.teachers.base import Outputs

_MOST_MAPPED = 256
"""Shards: their headers are parsed once, and a mapping holds no memory that the system cannot take back."""


@final
class CachedData(Dataset[tuple[Any, Outputs]]):
    """A task's samples with the teacher's outputs for them; indexed by (epoch, sample id)."""

    def __init__(self, data: Dataset[Any], folder: Path, layout: Layout, draws: int) -> None:
        """`draws` is after how many epochs the draws repeat."""
        self.data = data
        self._folder, self._layout, self._draws = folder, layout, draws
        self._shards: OrderedDict[int, Shard] = OrderedDict()

    def __getitem__(self, key: SampleKey) -> tuple[Any, Outputs]:
        epoch, sample_id = key
        draw = epoch % self._draws
        shard, row = self._layout.place(draw, sample_id)
        return self.data[draw, sample_id], self._open(shard).read(row)

    def _open(self, number: int) -> Shard:
        shard = self._shards.get(number)
        if shard is None:
            file = self._folder / shard_name(number)
            try:
                shard = self._shards[number] = Shard(file)
            except (UserError, RuntimeError, KeyError) as error:
                raise RunError(
                    f"{file} can no longer be read ({error}); make it again with distiller cache RECIPE --repair, then "
                    "continue with --resume"
                ) from error
            if len(self._shards) > _MOST_MAPPED:
                self._shards.popitem(last=False)
        return shard


@final
@dataclass(frozen=True)
class CachedCollation:
    """The loader's `collate_fn`."""

    task: Cacheable[Any, Any]

    def __call__(self, samples: Sequence[tuple[Any, Outputs]]) -> MicroBatch:
        batch = self.task.collate([sample for sample, _ in samples])
        return MicroBatch(batch, self.task.restore(batch, [outputs for _, outputs in samples]))
