"""A teacher that is asked ahead of the student changes nothing: losses and students are those without, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distiller.config.placements import PLACEMENTS
from tests.distributed.ranks import on_ranks
from tests.placement_contract import placement_of, train_cases
from tests.toy_network import save_toy

# The first test of each world starts its ranks and runs all of their cases.
pytestmark = pytest.mark.timeout(400)
ALONE = ("replicated", "cpu", "streamed", "disk")
TOGETHER = (
    *("replicated", "cpu", "streamed", "streamed, shared transfers", "disk", "balanced", "sequential"),
    *("custom, spread", "rank0", "rank0, the last rank", "sharded", "sharded, offloaded"),
)
DEPTHS = (1, 3, 9)
"""Updates ahead; the runs have five."""


def runs_of_all_cases(new_folder: Callable[[str], Path], on_gpu: bool) -> Callable[[int, int], dict[str, Any]]:
    """(ranks, updates ahead) -> loss series and students of each case, two micro-batches an update."""
    weights, known = save_toy(new_folder("toy")), {}

    def get(world_size: int, depth: int) -> dict[str, Any]:
        if (world_size, depth) not in known:
            folder = new_folder(f"ahead-{world_size}-{depth}")
            cases = list(ALONE if world_size == 1 else TOGETHER)
            arguments = (weights, folder, cases, 8 // world_size, [2], depth, depth > 0, on_gpu)
            known[world_size, depth] = on_ranks(world_size, train_cases, *arguments, timeout_s=300)[0]
        return known[world_size, depth]

    return get


def assert_same(trained: Callable[[int, int], dict[str, Any]], case: str, world_size: int, depth: int) -> None:
    """Losses and student of a case, bit for bit those without asking ahead."""
    result, reference = trained(world_size, depth)[f"{case} 2"], trained(world_size, 0)[f"{case} 2"]
    assert not isinstance(result, str), result
    assert result[0] == reference[0]
    assert np.array_equal(result[1], reference[1])
    # Measured between updates, while answers for the next ones are under way.
    assert result[2] == reference[2]
    assert len(result[2]) == 3 or world_size > 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return runs_of_all_cases(tmp_path_factory.mktemp, on_gpu=False)


@pytest.mark.parametrize("depth", [*DEPTHS[:-1], pytest.param(DEPTHS[-1], marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("case", "world_size"), [(case, 1) for case in ALONE] + [(case, 2) for case in TOGETHER], ids=str
)
def test_runs_are_the_same(trained, case, world_size, depth):
    assert_same(trained, case, world_size, depth)


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_a_run_with_a_teacher_in_processes_of_its_own_is_the_same(trained, tmp_path, depth):
    """They take seconds to start."""
    case, weights = "dedicated, two processes", save_toy(tmp_path / "toy")
    found = on_ranks(2, train_cases, weights, tmp_path, [case], 4, [2], depth, True, timeout_s=300)[0][f"{case} 2"]
    assert not isinstance(found, str), found
    losses, student, held_out = trained(2, 0)["replicated 2"]
    assert found[0] == losses
    assert np.array_equal(found[1], student)
    assert found[2] == held_out


def test_every_placement_that_can_be_asked_ahead_is():
    can = {spec.name for spec in PLACEMENTS.values() if not spec.why_not_prefetched}
    assert {placement_of(case) for case in TOGETHER} | {"dedicated"} == can
