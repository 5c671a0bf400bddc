"""A teacher that is asked ahead on a stream of its own: losses and students are those without, bit for bit."""

from __future__ import annotations

import pytest

from tests.distributed.test_prefetching import ALONE, TOGETHER, assert_same, runs_of_all_cases
from tests.gpu.ranks import NUM_GPUS

pytestmark = [pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU"), pytest.mark.timeout(500)]
WORLDS = [count for count in (1, 2) if count <= NUM_GPUS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return runs_of_all_cases(tmp_path_factory.mktemp, on_gpu=True)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    ("case", "world_size"),
    [(case, count) for count in WORLDS for case in (ALONE if count == 1 else TOGETHER)],
    ids=str,
)
def test_runs_are_the_same(trained, case, world_size, depth):
    assert_same(trained, case, world_size, depth)
