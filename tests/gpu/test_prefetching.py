"""A teacher that is asked ahead on a stream of its own: losses and students are those without, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.distributed.ranks import on_ranks
from tests.distributed.test_prefetching import ALONE, TOGETHER
from tests.gpu.ranks import NUM_GPUS
from tests.placement_contract import train_cases
from tests.toy_network import save_toy

pytestmark = [pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU"), pytest.mark.timeout(500)]
WORLDS = [count for count in (1, 2) if count <= NUM_GPUS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(ranks, updates ahead) -> loss series and students of each case."""
    weights, known = save_toy(tmp_path_factory.mktemp("toy")), {}

    def get(world_size: int, depth: int) -> dict[str, Any]:
        if (world_size, depth) not in known:
            folder = tmp_path_factory.mktemp(f"ahead-{world_size}-{depth}")
            cases = list(ALONE if world_size == 1 else TOGETHER)
            arguments = (weights, folder, cases, 8 // world_size, [2], depth, depth > 0, True)
            known[world_size, depth] = on_ranks(world_size, train_cases, *arguments, timeout_s=400)[0]
        return known[world_size, depth]

    return get


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    ("case", "world_size"),
    [(case, count) for count in WORLDS for case in (ALONE if count == 1 else TOGETHER)],
    ids=str,
)
def test_runs_are_the_same(trained, case, world_size, depth):
    result, reference = trained(world_size, depth)[f"{case} 2"], trained(world_size, 0)[f"{case} 2"]
    assert not isinstance(result, str), result
    assert result[0] == reference[0]
    assert np.array_equal(result[1], reference[1])
