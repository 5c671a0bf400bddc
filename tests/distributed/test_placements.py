"""The contract: every placement answers and trains as `replicated` does in one process, on one, two and four ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distiller.config.placements import PLACEMENTS
from tests.distributed.ranks import on_ranks
from tests.placement_contract import (
    CASES,
    IN_PROCESSES,
    answers,
    answers_of_cases,
    open_case,
    placement_of,
    train_cases,
)
from tests.toy_network import ToyNetwork, save_toy

# The first test of each world starts its ranks and runs all of their cases.
pytestmark = pytest.mark.timeout(500)
WORLD_SIZES = (1, 2)
ON_FOUR = [case for case in CASES if placement_of(case) in ("rank0", "cpu", "balanced")]
# Batched rows (rank0), other ranks' stand-ins and another kernel for another batch size round differently.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    return save_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def answered(weights):
    """(ranks, dtype) -> what each rank answered in each case; all cases share one start of the ranks."""
    known: dict[tuple[int, str], list[dict[str, Any]]] = {}

    def get(world_size: int, dtype: str) -> list[dict[str, Any]]:
        if (world_size, dtype) not in known:
            cases = list(CASES) if world_size < 4 else ON_FOUR
            known[world_size, dtype] = on_ranks(world_size, answers_of_cases, weights, cases, dtype, timeout_s=400)
        return known[world_size, dtype]

    return get


@pytest.fixture(scope="module")
def expected(weights):
    """(rank, modules, dtype) -> the answers of `replicated` in one process, without autocast."""
    import torch

    known: dict[tuple[int, int, str], list[np.ndarray]] = {}

    def get(rank: int, num_modules: int, dtype: str) -> list[np.ndarray]:
        if (rank, num_modules, dtype) not in known:
            teacher = open_case("replicated", ToyNetwork(weights, num_modules), getattr(torch, dtype))
            known[rank, num_modules, dtype] = answers(teacher, rank, num_modules, autocast=False)
        return known[rank, num_modules, dtype]

    return get


@pytest.mark.parametrize("num_modules", [1, 2])
@pytest.mark.parametrize(
    ("case", "world_size", "dtype"),
    # bfloat16 with its float32 islands on two ranks only: a start of the ranks costs most of a minute on two cores.
    [(case, count, "float32") for count in WORLD_SIZES for case in CASES]
    + [(case, 2, "bfloat16") for case in CASES]
    + [(case, 4, "float32") for case in ON_FOUR],
)
def test_answers_equal_those_of_replicated(answered, expected, case, world_size, num_modules, dtype):
    for rank, results in enumerate(answered(world_size, dtype)):
        result = results[f"{case} {num_modules}"]
        assert not isinstance(result, str), f"rank {rank}:\n{result}"
        ours, theirs = result[0], expected(rank, num_modules, dtype)
        for mine, reference in zip(ours, theirs, strict=True):
            assert np.abs(mine - reference).max() <= TOLERANCE[dtype] * max(1.0, np.abs(reference).max())


@pytest.fixture(scope="module")
def trained(weights, tmp_path_factory):
    """Ranks -> loss series and students of each case, 8 samples an update."""
    known: dict[int, dict[str, Any]] = {}

    def get(world_size: int) -> dict[str, Any]:
        if world_size not in known:
            cases = list(CASES) if world_size < 4 else ON_FOUR
            folder = tmp_path_factory.mktemp(f"trained-{world_size}")
            arguments = (weights, folder, cases, 8 // world_size, [1, 2])
            known[world_size] = on_ranks(world_size, train_cases, *arguments, timeout_s=400)[0]
        return known[world_size]

    return get


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("case", "world_size"), [(c, n) for n in WORLD_SIZES for c in CASES] + [(c, 4) for c in ON_FOUR]
)
def test_students_equal_that_of_replicated(trained, case, world_size, accumulation):
    result, reference = trained(world_size)[f"{case} {accumulation}"], trained(1)["replicated 1"]
    assert not isinstance(result, str), result
    assert np.abs(np.array(result[0]) - np.array(reference[0])).max() <= 2e-6
    assert np.linalg.norm(result[1] - reference[1]) <= 1e-5 * np.linalg.norm(reference[1])
    # After updates 2, 4 and 5, the last one. The students of `cached`, which measures nothing, are the same.
    expected = [] if placement_of(case) == "cached" else reference[2]
    assert result[2] == pytest.approx(expected, abs=2e-6)
    assert len(reference[2]) == 3


def test_every_placement_is_under_the_contract():
    # Those of processes of their own are in test_dedicated.py.
    assert {placement_of(case) for case in (*CASES, *IN_PROCESSES)} == set(PLACEMENTS)
