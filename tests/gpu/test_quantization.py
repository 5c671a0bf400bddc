"""Quantised teachers on GPUs: run by hand, `python -m pytest tests/gpu/test_quantization.py -s`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distiller.config.quantization import quantizations
from distiller.teachers.quantization.layers import layer_class
from tests.distributed.ranks import on_ranks
from tests.distributed.test_quantized_placements import LARGEST_ERROR, LIVE
from tests.gpu.ranks import NUM_GPUS
from tests.placement_contract import answers_of_cases, placement_of
from tests.toy_network import save_toy

pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU")


@pytest.mark.timeout(280)
@pytest.mark.parametrize("compile_mode", ["none", "default"])
@pytest.mark.parametrize("quantization", quantizations())
@pytest.mark.parametrize("world_size", [n for n in (1, 2) if n <= NUM_GPUS])
def test_quantised_placements_give_the_outputs_of_the_quantised_replicated(
    tmp_path, world_size, quantization, compile_mode
):
    weights: Path = save_toy(tmp_path)
    # What computes on the CPU is not compiled, and rounds otherwise.
    cases = [case for case in LIVE if placement_of(case) != "cpu"]
    options = {"quantization": quantization, "compile": compile_mode}
    quantised: list[dict[str, Any]] = on_ranks(
        world_size, partial(answers_of_cases, **options), weights, cases, "bfloat16", True, timeout_s=240
    )
    plain: list[dict[str, Any]] = on_ranks(world_size, answers_of_cases, weights, ["replicated"], "bfloat16", True)
    for rank, results in enumerate(quantised):
        for case in cases:
            for num_modules in (1, 2):
                result, reference = results[f"{case} {num_modules}"], results[f"replicated {num_modules}"]
                assert not isinstance(result, str), f"rank {rank}, {case}:\n{result}"
                loose = 3e-2 if placement_of(case) == "rank0" else 0.0
                for ours, theirs in zip(result[0], reference[0], strict=True):
                    assert np.abs(ours - theirs).max() <= loose * max(1.0, np.abs(theirs).max()), (rank, case)
        for num_modules in (1, 2):
            ours, theirs = (np.concatenate(found[rank][f"replicated {num_modules}"][0]) for found in (quantised, plain))
            error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
            print(f"{quantization}, rank {rank}: {error:.3f} from bfloat16")
            assert error < LARGEST_ERROR[quantization]


@pytest.mark.filterwarnings("ignore:TensorFloat32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("quantization", "largest_error"), [("int8", 0.015), ("fp8", 0.05), ("nf4", 0.12)])
def test_a_large_layer_is_near_to_the_one_that_it_replaces(quantization, largest_error, dtype):
    torch.manual_seed(0)
    kind, linear = layer_class(quantization), nn.Linear(5120, 13824, device="cuda").to(dtype)
    layer = kind(*kind.quantize(linear.weight.detach()), linear.bias, linear.weight.shape, dtype)
    compiled = torch.compile(layer, fullgraph=True)
    with torch.no_grad():
        for num_rows in (1, 2, 17, 1560, -17):
            x = torch.randn(abs(num_rows), 5120, device="cuda", dtype=dtype)
            if num_rows < 0:  # other strides
                x = x.t().contiguous().t()
            expected = linear(x).float()
            for output in (layer(x), compiled(x)):
                assert output.dtype == dtype
                assert (output - expected).norm() < largest_error * expected.norm(), num_rows


@pytest.mark.parametrize("size", [(48, 33), (7, 9), (130, 5120)])
def test_int8_products_are_exact(size):
    """Against a layer on the CPU, whose sums are exact too; sizes that are no multiples of a tile."""
    torch.manual_seed(0)
    kind, linear = layer_class("int8"), nn.Linear(size[1], size[0])
    layer = kind(*kind.quantize(linear.weight.detach()), linear.bias, linear.weight.shape, torch.float32)
    x = torch.randn(131, size[1])
    with torch.no_grad():
        expected = layer(x)
        assert torch.allclose(layer.cuda()(x.cuda()).cpu(), expected, rtol=1e-6, atol=1e-6)
