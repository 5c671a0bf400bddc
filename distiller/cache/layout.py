"""Which stored output lies where: shards of samples that training meets one after the other."""

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
    """Each draw has shards of its own, in which samples lie in the order of that epoch.

    So a run in this order reads files from front to back, and the teacher is asked for the micro-batches that a live
    run of this order and `train.batch_size` asks for, whatever the number of ranks: the outputs' last bits can depend
    on what else is in a batch. Any other order, world size and batch size can be read too.
    """

    num_samples: int
    draws: int
    per_shard: int
    seed: int
    """Of the order."""

    @property
    def num_items(self) -> int:
        """Outputs in all."""
        return self.num_samples * self.draws

    @property
    def shards_per_draw(self) -> int:
        """Files of each draw."""
        return -(-self.num_samples // self.per_shard)

    @property
    def num_shards(self) -> int:
        """Files in all."""
        return self.draws * self.shards_per_draw

    def keys_of(self, shard: int) -> list[SampleKey]:
        """(draw, sample id) of what a shard holds, in its order."""
        draw, number = divmod(shard, self.shards_per_draw)
        ids = _order(self.seed, draw, self.num_samples)[number * self.per_shard : (number + 1) * self.per_shard]
        return [(draw, sample_id) for sample_id in ids]

    def size_of(self, shard: int) -> int:
        """Samples in a shard."""
        number = shard % self.shards_per_draw
        return min(self.per_shard, self.num_samples - number * self.per_shard)

    def locate(self, draw: int, sample_id: int) -> tuple[int, int]:
        """(shard, row) of a sample's output."""
        position = int(_positions(self.seed, draw, self.num_samples)[sample_id])
        number, row = divmod(position, self.per_shard)
        return draw * self.shards_per_draw + number, row


def samples_per_shard(num_samples: int, draws: int, num_files: int, request_size: int) -> int:
    """Samples a file: about `num_files` files in all, each of whole requests and none much shorter than the others.

    Args:
        request_size: samples that the teacher is asked for at once.
    """
    requests = -(-num_samples // request_size)
    per_draw = min(max(1, -(-num_files // draws)), requests)
    return -(-requests // per_draw) * request_size


def shard_name(shard: int) -> str:
    """A shard's file."""
    return f"outputs-{shard:06d}.safetensors"


@functools.lru_cache(maxsize=1)
def _order(seed: int, draw: int, num_samples: int) -> list[int]:
    return sample_order(seed, draw, num_samples)


@functools.lru_cache(maxsize=2)
def _positions(seed: int, draw: int, num_samples: int) -> Tensor:
    """Where in a draw's order each sample stands, int64 [num_samples]."""
    positions = torch.empty(num_samples, dtype=torch.int64)
    positions[torch.tensor(sample_order(seed, draw, num_samples))] = torch.arange(num_samples)
    return positions
