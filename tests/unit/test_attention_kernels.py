"""Which attention kernels an update ran: found in a profile, said once, with a warning where none is fused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, record_function

from distiller import commands
from distiller.training.attention_kernels import KERNELS, attention_kernels, messages
from tests import toys

NAMES = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "flash_attn::_flash_attn_forward": "flash",
    "aten::_scaled_dot_product_cudnn_attention": "cuDNN",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_attention_math": "math",
    "aten::scaled_dot_product_attention": None,
}


@pytest.mark.parametrize(("name", "kernel"), NAMES.items())
def test_kernels_are_known_by_the_operators_names(name, kernel):
    assert next((found for pattern, found in KERNELS if pattern.search(name)), None) == kernel


def test_each_part_of_an_update_has_its_own_kernels():
    q = torch.randn(2, 4, 16, 24, requires_grad=True)
    mask = torch.zeros(2, 1, 16, 16)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        F.scaled_dot_product_attention(q, q, q)  # of no part
        with record_function("teacher"), torch.no_grad():
            F.scaled_dot_product_attention(q, q, q)
        with record_function("student"), sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q, q, q, mask).sum().backward()
    found = attention_kernels(profiled.events())
    assert {part: list(kernels) for part, kernels in found.items()} == {"teacher": ["flash"], "student": ["math"]}
    assert messages(found, on_gpu=False) == ["attention kernels: teacher flash, student math"]
    first, warning = messages(found, on_gpu=True)
    assert first == "attention kernels: teacher flash, student math"
    assert warning.startswith(
        "warning: student: attention runs without a fused kernel (head size 24, with a mask), in several times"
    )
    assert messages({}, on_gpu=True) == []


@pytest.mark.parametrize(
    ("max_steps", "profiled", "num_lines"), [(3, None, 1), (1, None, 0), (4, [3, 4], 0), (4, [4, 4], 1)]
)
def test_a_run_says_it_once(make_recipe, capsys, max_steps, profiled, num_lines):
    """Not in a run of one update, nor where the recipe has the same update profiled."""
    recipe = make_recipe(train={"max_steps": max_steps, "log_every": 1}, profile={"steps": profiled})
    commands.train(recipe, resume=False)
    told = capsys.readouterr().err
    assert told.count("attention kernels: teacher flash, student flash\n") == num_lines
    assert "warning" not in told
    assert len(toys.read_metrics(Path(recipe.output_dir))) == max_steps
