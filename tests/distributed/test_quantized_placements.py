"""Quantised teachers: every placement gives the outputs of the quantised `replicated`, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from distiller.config.placements import PLACEMENTS
from distiller.config.quantization import quantizations
from tests.distributed.ranks import on_ranks
from tests.placement_contract import CASES, answers_of_cases, placement_of
from tests.toy_network import save_toy

QUANTIZED = [name for name in CASES if not PLACEMENTS[placement_of(name)].why_not_quantized]
LIVE = [name for name in QUANTIZED if placement_of(name) != "cached"]
LARGEST_ERROR = {"int8": 0.02, "fp8": 0.1, "nf4": 0.3}
"""Of the toy's outputs, relative, in the 2-norm."""


@pytest.mark.parametrize("quantization", quantizations())
@pytest.mark.parametrize("world_size", [1, 2])
def test_quantised_placements_give_the_outputs_of_the_quantised_replicated(tmp_path, world_size, quantization):
    weights = save_toy(tmp_path)
    quantised: list[dict[str, Any]] = on_ranks(
        world_size, partial(answers_of_cases, quantization=quantization), weights, LIVE, "bfloat16", timeout_s=200
    )
    plain = on_ranks(world_size, answers_of_cases, weights, ["replicated"], "bfloat16")
    for rank, results in enumerate(quantised):
        for case in LIVE:
            for num_modules in (1, 2):
                result, (reference, *_) = results[f"{case} {num_modules}"], results[f"replicated {num_modules}"]
                assert not isinstance(result, str), f"rank {rank}, {case}:\n{result}"
                # A batch of another size may be computed by another kernel.
                loose = 3e-2 if placement_of(case) == "rank0" else 0.0
                for ours, theirs in zip(result[0], reference, strict=True):
                    assert np.abs(ours - theirs).max() <= loose * max(1.0, np.abs(theirs).max()), (rank, case)
        for num_modules in (1, 2):
            ours, theirs = (np.concatenate(found[rank][f"replicated {num_modules}"][0]) for found in (quantised, plain))
            error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
            assert 1e-3 < error < LARGEST_ERROR[quantization], (rank, quantization, error)
