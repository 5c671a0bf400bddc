"""`rank0` over NCCL: run by hand, `python -m pytest tests/gpu/test_rank0.py`. CI has no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.ranks import on_ranks
from tests.gpu.ranks import NUM_GPUS
from tests.placement_contract import CASES, answers, open_case, placement_of
from tests.toy_network import ToyNetwork, save_toy

# Relative to the largest output: another batch size is another kernel.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
pytestmark = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")


def compare(weights: Path, cases: list[str], dtype: str) -> dict[str, Any]:
    """Each case's relative difference from `replicated`, whether this rank is the holder, and bytes on its GPU:
    as told, once loaded, and those that are left when everything has been answered and closed."""
    from accelerate import PartialState

    state = PartialState()
    device, rank, results = str(state.device), state.process_index, {}
    replicated = open_case("replicated", ToyNetwork(weights, 2), getattr(torch, dtype), device)
    expected = answers(replicated, rank, 2, device=device)
    replicated.close()
    for case in cases:
        before = torch.cuda.memory_allocated(device)
        teacher = open_case(case, ToyNetwork(weights, 2), getattr(torch, dtype), device)
        told, loaded = teacher.memory().gpu_bytes, torch.cuda.memory_allocated(device) - before
        ours = answers(teacher, rank, 2, device=device)
        after = torch.cuda.memory_allocated(device) - before
        teacher.close()
        left = torch.cuda.memory_allocated(device) - before
        differences = [np.abs(a - b).max() / max(1.0, np.abs(b).max()) for a, b in zip(ours, expected, strict=True)]
        is_holder = rank == (state.num_processes - 1 if CASES[case].get("rank") == -1 else 0)
        results[case] = max(differences), is_holder, (told, loaded, after, left)
    return results


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world_size", [n for n in (2, 4) if n <= NUM_GPUS])
def test_answers_equal_those_of_replicated_and_one_gpu_holds_all(tmp_path, world_size, dtype):
    cases = [case for case in CASES if placement_of(case) == "rank0"]
    of_ranks = on_ranks(world_size, compare, save_toy(tmp_path), cases, dtype, timeout_s=200)
    for case in cases:
        for difference, is_holder, (told, loaded, after, left) in (of_rank[case] for of_rank in of_ranks):
            assert difference <= TOLERANCE[dtype]
            assert left == 0
            if is_holder:
                # The allocator rounds up to 512 bytes.
                assert 0 < told <= loaded == after
            else:
                assert told == loaded == after == 0
