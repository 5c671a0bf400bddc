"""Sample order and random draws depend on (seed, epoch, sample id) and on nothing else."""

import random

import numpy as np
import pytest
import torch

from distiller.data import rng
from distiller.data.order import RankSampler, UpdatePlan


def updates(
    batch_size: int, accumulation: int, world_size: int, first: int = 0, last: int = 6
) -> list[list[tuple[int, int]]]:
    """What all ranks see together, update by update."""
    plan = UpdatePlan(27, batch_size, accumulation, world_size, seed=5)
    streams = [list(RankSampler(plan, rank, first, last)) for rank in range(world_size)]
    seen = []
    for update in range(last - first):
        micro_batches = range(update * accumulation, (update + 1) * accumulation)
        seen.append([key for m in micro_batches for stream in streams for key in stream[m]])
    return seen


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "world_size"), [(4, 1, 2), (4, 2, 1), (2, 2, 2), (2, 1, 4), (1, 8, 1)]
)
def test_an_update_is_the_same_under_every_split(batch_size, accumulation, world_size):
    assert updates(batch_size, accumulation, world_size) == updates(8, 1, 1)


def test_an_epoch_has_every_sample_once_but_for_the_dropped_rest():
    first_epoch = [key for update in updates(8, 1, 1)[:3] for key in update]
    assert len(set(first_epoch)) == 24
    assert {epoch for epoch, _ in first_epoch} == {0}
    assert {epoch for epoch, _ in updates(8, 1, 1)[3]} == {1}


@pytest.mark.parametrize(("batch_size", "whole", "dropped"), [(5, 2, 7), (9, 1, 9), (27, 0, 27)])
def test_the_dropped_rest_is_what_whole_updates_leave(batch_size, whole, dropped):
    """Of 27 samples, in two micro-batches of these sizes; with the third there is no whole update."""
    plan = UpdatePlan(27, batch_size, 2, 1, seed=5)
    assert (plan.updates_per_epoch, plan.dropped_per_epoch) == (whole, dropped)


@pytest.mark.parametrize("first", [2, 3, 4])
def test_a_resumed_sampler_goes_on_where_the_other_stopped(first):
    """Within the first epoch, which has three updates, at the start of the second, and within that."""
    assert updates(4, 1, 2, first=first) == updates(4, 1, 2)[first:]


def test_a_sampler_knows_its_number_of_micro_batches():
    sampler = RankSampler(UpdatePlan(27, 4, 2, 1, seed=5), 0, 2, 5)
    assert len(sampler) == len(list(sampler)) == 6


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [rng.sample_order(seed, epoch, 50) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_draws_neither_read_nor_move_global_random_state():
    torch.manual_seed(0)
    first = rng.noise(1, 2, 3, (2, 2))
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    before = torch.random.get_rng_state()
    assert torch.equal(rng.noise(1, 2, 3, (2, 2)), first)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_draws_differ_by_seed_epoch_sample_and_purpose():
    keys = [(1, 0, 0, "a"), (0, 1, 0, "a"), (0, 0, 1, "a"), (0, 0, 0, "b"), (0, 0, 0, "a")]
    assert len({rng.uniform(*key) for key in keys}) == len(keys)


def test_draws_are_recorded():
    """Another value here would change every run's trajectory, and break resuming one across versions."""
    assert rng.sample_order(0, 0, 8) == RECORDED_ORDER
    assert rng.uniform(0, 0, 0, "sigma") == pytest.approx(RECORDED_UNIFORM, abs=1e-15)
    assert rng.normal(0, 0, 0, "sigma") == pytest.approx(RECORDED_NORMAL, abs=1e-15)
    assert rng.noise(0, 0, 0, (3,)).tolist() == pytest.approx(RECORDED_NOISE, abs=1e-6)


RECORDED_ORDER = [0, 4, 5, 6, 7, 2, 1, 3]
RECORDED_UNIFORM = 0.40346045865854796
RECORDED_NORMAL = -0.926209363751625
RECORDED_NOISE = [0.3996302, 0.68749, -2.2879999]
