"""Quantised teachers: every placement gives the outputs of the quantised `replicated`, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distiller.config.placements import PLACEMENTS
from distiller.config.quantization import quantizations
from tests.distributed.ranks import on_ranks
from tests.placement_contract import CASES, answers_of_cases, placement_of
from tests.toy_network import save_toy

# One start of the ranks for all quantisations.
pytestmark = pytest.mark.timeout(500)
QUANTIZED = [name for name in CASES if not PLACEMENTS[placement_of(name)].why_not_quantized]
LIVE = [name for name in QUANTIZED if placement_of(name) != "cached"]
LARGEST_ERROR = {"int8": 0.02, "fp8": 0.1, "nf4": 0.3}
"""Of the toy's outputs, relative, in the 2-norm."""


def answers_of_quantizations(weights: Path) -> dict[str, dict[str, Any]]:
    """Quantisation -> each case's answers; unquantised those of `replicated` alone."""
    found = {kind: answers_of_cases(weights, LIVE, "bfloat16", quantization=kind) for kind in quantizations()}
    return found | {"none": answers_of_cases(weights, ["replicated"], "bfloat16")}


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_quantised_placements_give_the_outputs_of_the_quantised_replicated(tmp_path, world_size):
    for rank, found in enumerate(on_ranks(world_size, answers_of_quantizations, save_toy(tmp_path), timeout_s=400)):
        for kind in quantizations():
            for num_modules in (1, 2):
                reference = found[kind][f"replicated {num_modules}"][0]
                for case in LIVE:
                    result = found[kind][f"{case} {num_modules}"]
                    assert not isinstance(result, str), f"rank {rank}, {kind}, {case}:\n{result}"
                    # A batch of another size may be computed by another kernel.
                    loose = 3e-2 if placement_of(case) == "rank0" else 0.0
                    for ours, theirs in zip(result[0], reference, strict=True):
                        difference = np.abs(ours - theirs).max()
                        assert difference <= loose * max(1.0, np.abs(theirs).max()), (rank, kind, case)
                ours, theirs = (np.concatenate(found[of][f"replicated {num_modules}"][0]) for of in (kind, "none"))
                error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
                assert 1e-3 < error < LARGEST_ERROR[kind], (rank, kind, error)
