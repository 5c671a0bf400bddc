"""The contract on GPUs: run by hand, `python -m pytest tests/gpu/test_placements.py -s`. CI has no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState

from tests.distributed.ranks import on_ranks
from tests.gpu.ranks import NUM_GPUS
from tests.placement_contract import CASES, answers_of_cases, open_case, placement_of, requests_of
from tests.toy_network import ToyNetwork, save_toy

# Relative to the largest output. Another batch size (rank0) is another kernel, and so is the CPU; the others compute
# what `replicated` does, bit for bit.
LOOSE = {"float32": 1e-5, "bfloat16": 3e-2}
pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU")


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """(ranks, dtype) -> what each rank answered in each case."""
    weights: Path = save_toy(tmp_path_factory.mktemp("toy"))
    known: dict[tuple[int, str], list[dict[str, Any]]] = {}

    def get(world_size: int, dtype: str) -> list[dict[str, Any]]:
        if (world_size, dtype) not in known:
            cases = list(CASES)
            known[world_size, dtype] = on_ranks(
                world_size, answers_of_cases, weights, cases, dtype, True, timeout_s=240
            )
        return known[world_size, dtype]

    return get


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world_size", [n for n in (1, 2, 4) if n <= NUM_GPUS])
@pytest.mark.parametrize("case", CASES)
def test_answers_equal_those_of_replicated(answered, case, world_size, dtype):
    if case == "sharded, offloaded" and world_size == 1:
        pytest.skip("refused: there is nobody to share with, and streamed does better")
    loose = placement_of(case) in ("rank0", "cpu")
    for rank, results in enumerate(answered(world_size, dtype)):
        for num_modules in (1, 2):
            result, reference = results[f"{case} {num_modules}"], results[f"replicated {num_modules}"]
            assert not isinstance(result, str), f"rank {rank}:\n{result}"
            for mine, theirs in zip(result[0], reference[0], strict=True):
                assert np.abs(mine - theirs).max() <= (LOOSE[dtype] if loose else 0) * max(1.0, np.abs(theirs).max())


def cases_on_other_gpus(weights: Path) -> list[str]:
    """The cases after which this process has a context on a GPU that is not its own."""
    state = PartialState()
    own, others, found = str(state.device), set(range(NUM_GPUS)) - {state.device.index}, []
    network = ToyNetwork(weights)
    for case in CASES:
        if placement_of(case) in ("balanced", "sequential", "custom"):
            continue  # these compute on several GPUs
        teacher = open_case(case, network, torch.float32, own)
        for step in range(2):
            teacher.predict(requests_of(state.process_index, step, 1, own))
        torch.cuda.synchronize()
        teacher.close()
        opened = {gpu for gpu in others if torch._C._cuda_hasPrimaryContext(gpu)}
        if opened:
            found.append(case)
            others -= opened
    return found


@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
def test_a_rank_takes_no_memory_of_another_rank_s_gpu(tmp_path):
    """A context takes half a GiB; a thread that has not set its device opens one on the first GPU."""
    assert on_ranks(2, cases_on_other_gpus, save_toy(tmp_path), timeout_s=240) == [[], []]
