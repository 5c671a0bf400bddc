"""`swap` on real GPUs: run by hand, `python -m pytest tests/gpu/test_swap.py`. CI has no GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.distributed.ranks import on_ranks
from tests.gpu.ranks import NUM_GPUS
from tests.placement_contract import answers, open_case
from tests.toy_network import ToyNetwork, save_toy

pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU")


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    return save_toy(tmp_path_factory.mktemp("toy"))


def are_equal(ours: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    return all(np.array_equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["swap", "swap, pageable"])
def test_answers_equal_those_of_replicated(weights, case, dtype):
    replicated, swap = (
        open_case(name, ToyNetwork(weights, 2), getattr(torch, dtype), "cuda:0") for name in ("replicated", case)
    )
    assert swap._host.piece(0).is_pinned() == (case == "swap")
    assert are_equal(answers(swap, 0, 2, device="cuda:0"), answers(replicated, 0, 2, device="cuda:0"))
    swap.close()


@pytest.mark.parametrize("case", ["swap", "swap, pageable"])
def test_one_module_visits_the_gpu_and_leaves_nothing(weights, case):
    """Twice a module's bytes would be both at once."""
    replicated = open_case("replicated", ToyNetwork(weights, 2), device="cuda:0")
    answers(replicated, 0, 2, device="cuda:0")
    one_module = replicated.memory().gpu_bytes // 2
    replicated.close()
    before = torch.cuda.memory_allocated(0)
    teacher = open_case(case, ToyNetwork(weights, 2), device="cuda:0")
    assert torch.cuda.memory_allocated(0) == before
    torch.cuda.reset_peak_memory_stats(0)
    answers(teacher, 0, 2, device="cuda:0")
    assert one_module <= torch.cuda.max_memory_allocated(0) - before < 2 * one_module
    assert torch.cuda.memory_allocated(0) == before
    memory = teacher.memory()
    assert memory.gpu_bytes == 0
    assert memory.host_bytes >= 2 * one_module
    teacher.close()


def compare(weights: Path, dtype: str) -> bool:
    from accelerate import PartialState

    state = PartialState()
    device, rank = str(state.device), state.process_index
    replicated, swap = (
        open_case(name, ToyNetwork(weights, 2), getattr(torch, dtype), device) for name in ("replicated", "swap")
    )
    same = are_equal(answers(swap, rank, 2, device=device), answers(replicated, rank, 2, device=device))
    swap.close()
    return same


@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_rank_gets_its_copy_beside_nccl(weights, dtype):
    assert on_ranks(2, compare, weights, dtype) == [True, True]
