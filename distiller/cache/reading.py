"""Reads a cache for training: sample by sample, in loader processes, from mapped memory."""

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

_MAX_MAPPED_SHARDS = 256
"""Shards that stay mapped, so that headers are not parsed again. The system can reclaim the memory of a mapping."""


@final
class CachedData(Dataset[tuple[Any, Outputs]]):
    """A task's samples with the teacher's outputs for them; indexed by (epoch, sample id)."""

    def __init__(self, data: Dataset[Any], folder: Path, layout: Layout, draws: int) -> None:
        """`draws`: number of epochs after which the draws repeat."""
        self.data = data
        self._folder, self._layout, self._draws = folder, layout, draws
        self._shards: OrderedDict[int, Shard] = OrderedDict()

    def __getitem__(self, key: SampleKey) -> tuple[Any, Outputs]:
        epoch, sample_id = key
        draw = epoch % self._draws
        shard, row = self._layout.locate(draw, sample_id)
        return self.data[draw, sample_id], self._open(shard).read(row)

    def _open(self, index: int) -> Shard:
        """The shard of this index, mapped. Raises RunError if its file can no longer be read."""
        shard = self._shards.get(index)
        if shard is None:
            file = self._folder / shard_name(index)
            try:
                shard = self._shards[index] = Shard(file)
            except (UserError, RuntimeError, KeyError) as error:
                raise RunError(
                    f"{file} can no longer be read ({error}); make it again with distiller cache RECIPE --repair, then "
                    "continue with --resume"
                ) from error
            if len(self._shards) > _MAX_MAPPED_SHARDS:
                self._shards.popitem(last=False)
        return shard


@final
@dataclass(frozen=True)
class CachedCollation:
    """The loader's `collate_fn`: makes a micro-batch of samples and their stored outputs."""

    task: Cacheable[Any, Any]

    def __call__(self, samples: Sequence[tuple[Any, Outputs]]) -> MicroBatch:
        batch = self.task.collate([sample for sample, _ in samples])
        return MicroBatch(batch, self.task.restore(batch, [outputs for _, outputs in samples]))
