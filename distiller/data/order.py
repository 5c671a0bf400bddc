"""The order of samples: which of them each rank gets in each update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from torch.utils.data import Sampler

from distiller.data.rng import sample_order

SampleKey = tuple[int, int]
"""(epoch, sample id): what a dataset is indexed with, since noise and timesteps depend on both."""


@final
@dataclass(frozen=True)
class UpdatePlan:
    """The split of every update: contiguous slices of the global batch, micro-batch by micro-batch, rank by rank."""

    num_samples: int
    batch_size: int
    accumulation_steps: int
    world_size: int
    seed: int

    @property
    def split(self) -> tuple[int, int, int, int]:
        """Everything but the number of samples, in the order of the fields."""
        return self.batch_size, self.accumulation_steps, self.world_size, self.seed

    @property
    def samples_per_update(self) -> int:
        """The global batch."""
        return self.batch_size * self.accumulation_steps * self.world_size

    @property
    def updates_per_epoch(self) -> int:
        """Whole updates; an incomplete last one is dropped."""
        return self.num_samples // self.samples_per_update

    @property
    def dropped_per_epoch(self) -> int:
        """Number of samples left out of each epoch; different ones each time, since each epoch has its own order."""
        return self.num_samples % self.samples_per_update

    def epoch_of(self, update: int) -> int:
        """The epoch of an update (counted from 0)."""
        return update // self.updates_per_epoch


@final
class RankSampler(Sampler[list[SampleKey]]):
    """Yields one rank's micro-batches, from one update up to another (counted from 0)."""

    def __init__(self, plan: UpdatePlan, rank: int, first_update: int, last_update: int) -> None:
        self.plan, self.rank = plan, rank
        self.first_update, self.last_update = first_update, last_update

    def __len__(self) -> int:
        return (self.last_update - self.first_update) * self.plan.accumulation_steps

    def __iter__(self) -> Iterator[list[SampleKey]]:
        plan, order, order_epoch = self.plan, [], -1
        for update in range(self.first_update, self.last_update):
            epoch = plan.epoch_of(update)
            if epoch != order_epoch:
                order, order_epoch = sample_order(plan.seed, epoch, plan.num_samples), epoch
            start = (update % plan.updates_per_epoch) * plan.samples_per_update
            for micro_batch in range(plan.accumulation_steps):
                first = start + (micro_batch * plan.world_size + self.rank) * plan.batch_size
                yield [(epoch, sample_id) for sample_id in order[first : first + plan.batch_size]]


def num_held_out(count: int, share: float) -> int:
    """How many of so many are held out: about that share, at least one where it is above 0, and never all of them."""
    return min(max(1, round(share * count)), count - 1) if share else 0
