"""The shard and the row in which each stored output is."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from distiller.data.order import SampleKey
from distiller.data.rng import sample_order


@final
@dataclass(frozen=True)
class Layout:
    """Each draw has its own shards, in which samples are in the order of that epoch.

    So a run in this order reads files from front to back. And while the cache is written, the teacher gets the same
    micro-batches as in a run without a cache of the same order and `train.batch_size`, with any number of ranks: the
    last bits of an output can depend on the other samples of its batch. A run with another order, world size or batch
    size can read the cache too.

    Attributes:
        draws: epochs whose outputs are stored; each epoch draws its own noise, timesteps and so on.
        per_shard: samples in each shard but the last of a draw.
        seed: of the order of samples.
    """

    num_samples: int
    draws: int
    per_shard: int
    seed: int

    @property
    def num_items(self) -> int:
        """Number of samples' outputs in all draws."""
        return self.num_samples * self.draws

    @property
    def shards_per_draw(self) -> int:
        """Number of shards, and files, of each draw."""
        return -(-self.num_samples // self.per_shard)

    @property
    def num_shards(self) -> int:
        """Number of shards, and files, of all draws."""
        return self.draws * self.shards_per_draw

    def keys_of(self, shard: int) -> list[SampleKey]:
        """(draw, sample id) of each row of a shard."""
        draw, index = divmod(shard, self.shards_per_draw)
        ids = _order(self.seed, draw, self.num_samples)[index * self.per_shard : (index + 1) * self.per_shard]
        return [(draw, sample_id) for sample_id in ids]

    def size_of(self, shard: int) -> int:
        """Number of samples in a shard."""
        index = shard % self.shards_per_draw
        return min(self.per_shard, self.num_samples - index * self.per_shard)

    def locate(self, draw: int, sample_id: int) -> tuple[int, int]:
        """(shard, row) of the outputs of a sample."""
        position = int(_positions(self.seed, draw, self.num_samples)[sample_id])
        index, row = divmod(position, self.per_shard)
        return draw * self.shards_per_draw + index, row


def samples_per_shard(num_samples: int, draws: int, num_files: int, request_size: int) -> int:
    """Samples in each file, for about `num_files` files of similar size in all draws, each of whole requests.

    Args:
        request_size: samples that the teacher is asked for at once.
    """
    requests = -(-num_samples // request_size)
    per_draw = min(max(1, -(-num_files // draws)), requests)
    return -(-requests // per_draw) * request_size


def shard_name(shard: int) -> str:
    """Name of a shard's file."""
    return f"outputs-{shard:06d}.safetensors"


@functools.lru_cache(maxsize=1)
def _order(seed: int, draw: int, num_samples: int) -> list[int]:
    return sample_order(seed, draw, num_samples)


@functools.lru_cache(maxsize=2)
def _positions(seed: int, draw: int, num_samples: int) -> Tensor:
    """Position of each sample id in a draw's order, int64 [num_samples]."""
    positions = torch.empty(num_samples, dtype=torch.int64)
    positions[torch.tensor(sample_order(seed, draw, num_samples))] = torch.arange(num_samples)
    return positions
