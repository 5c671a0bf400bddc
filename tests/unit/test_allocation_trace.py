"""What the planner counts of a computation that it follows without data, against figures calculated by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from distiller.planner.allocation_trace import AllocationTrace
from distiller.planner.compiled_blocks import keep_what_a_compiler_keeps
from distiller.planner.gpu_arithmetic import GpuArithmetic

KIB = 2**10
BF16 = torch.bfloat16


@contextmanager
def followed() -> Iterator[AllocationTrace]:
    trace = AllocationTrace()
    with FakeTensorMode(allow_non_fake_inputs=True), trace, GpuArithmetic(trace):
        yield trace


def excluded(trace: AllocationTrace, module: nn.Module) -> Any:
    trace.exclude(module.parameters())
    trace.restart()
    return module


def test_tensors_count_while_anything_refers_to_them():
    with followed() as trace:
        first = torch.empty(16, 16)  # 1 KiB
        second = first + 1
        view = second.view(256)
        assert trace.alive == trace.peak == 2 * KIB
        del first, second
        assert trace.alive == 1 * KIB
        del view
        assert (trace.alive, trace.peak) == (0, 2 * KIB)
        small = torch.empty(1)  # rounded up to what the allocator of a GPU gives
        assert trace.alive == 512
        del small


def test_excluded_tensors_do_not_count_and_their_memory_is_not_taken_for_theirs_later():
    with followed() as trace:
        weight = torch.empty(16, 16)
        trace.exclude([weight])
        assert trace.alive == 0
        del weight
        others = [torch.empty(16, 16) for _ in range(4)]
        assert trace.alive == 4 * KIB
        del others


def test_a_backward_pass_keeps_what_it_needs_and_then_the_gradients():
    with followed() as trace:
        layer = excluded(trace, nn.Linear(16, 16, bias=False))  # gradient: 1 KiB
        layer.weight.register_post_accumulate_grad_hook(lambda weight: trace.is_gradient(weight.grad))
        inputs = torch.empty(16, 16)  # 1 KiB
        trace.restart()
        hidden = layer(inputs).relu()  # relu keeps its output, the product's own is freed
        assert trace.alive == 2 * KIB
        hidden.sum().backward()
        del hidden
        # The inputs and the gradient are left.
        assert trace.alive == 2 * KIB
        trace.restart()
        layer(inputs).sum().backward()
        # From the second micro-batch on the gradient is there all the time.
        assert trace.peak - trace.peak_without_gradients == 1 * KIB
        del inputs


def test_work_is_counted_for_each_operation():
    with followed() as trace:
        left, right = torch.empty(8, 16), torch.empty(16, 32)
        trace.restart()
        product = left @ right
        total = product + 1
        counted = {kernel.flops: kernel.num_bytes for kernel in trace.kernels}
        assert counted == {2 * 8 * 16 * 32: 4 * (8 * 16 + 16 * 32 + 8 * 32), 0: 4 * 2 * 8 * 32}
        del left, right, product, total


def test_a_value_that_is_asked_is_false_unless_all_was_asked():
    with followed():
        values = torch.empty(4)
        for _ in range(20):  # memory of earlier answers is used again
            assert bool((values > 0).all())
            assert not bool((values > 0).any())


def test_one_kernel_keeps_its_result_alone():
    with followed() as trace:
        values = torch.empty(16, 16)
        trace.restart()
        result = trace.one_kernel(lambda values=values: (values.exp() + 1).log())
        assert (trace.alive, trace.peak) == (2 * KIB, 2 * KIB)
        assert not trace.kernels
        del values, result


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_holds_no_matrix_of_pairs(is_causal):
    with followed() as trace:
        query = torch.empty(1, 2, 512, 16, dtype=BF16, requires_grad=True)  # 32 KiB; all pairs would take 2 MiB
        trace.restart()
        output = F.scaled_dot_product_attention(query, query, query, is_causal=is_causal)
        # The output, and a float32 number for each query and head.
        assert trace.alive == (32 + 32 + 4) * KIB
        (kernel,) = trace.kernels
        assert kernel.flops == 4 * 2 * 512 * 512 * 16 // (2 if is_causal else 1)
        output.float().sum().backward()
        assert sum(one.flops for one in trace.kernels) == kernel.flops + kernel.flops * 5 // 2
        del output, query


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: F.layer_norm(x, (16,)), torch.float32),
        (lambda x: x.softmax(-1), torch.float32),
        (lambda x: F.linear(x, torch.empty(16, 16)), BF16),
        (lambda x: F.gelu(x), BF16),
        (lambda x: F.scaled_dot_product_attention(x.float(), x.float(), x.float()), BF16),
    ],
)
def test_autocast_gives_the_dtypes_that_it_gives_on_a_gpu(function, expected):
    with followed(), torch.autocast("cpu", dtype=BF16):
        assert function(torch.empty(1, 1, 16, 16, dtype=BF16)).dtype == expected
    with followed():
        assert function(torch.empty(1, 1, 16, 16, dtype=torch.float32)).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize(("weight_dtype", "kept"), [(BF16, 1), (torch.float32, 5)])
def test_rms_norm_is_one_kernel_where_the_dtypes_agree(weight_dtype, kept):
    """Otherwise torch falls back to several, which keep float32 tensors: here the raised input and its normed form."""
    with followed() as trace:
        inputs = torch.empty(64, 256, dtype=BF16, requires_grad=True)  # 32 KiB
        weight = torch.empty(256, dtype=weight_dtype, requires_grad=True)
        trace.exclude([weight, inputs])
        trace.restart()
        output = F.rms_norm(inputs, (256,), weight, 1e-6)
        assert trace.alive // (32 * KIB) == kept
        del inputs, weight, output


def test_recomputed_activations_are_followed_in_the_backward_pass_too():
    def block(values: Tensor, weight: Tensor) -> Tensor:
        values = F.layer_norm(values, (16,))
        heads = F.linear(values, weight).view(1, 1, 64, 16)
        return F.scaled_dot_product_attention(heads, heads, heads).view(64, 16)

    with followed() as trace:
        weight = torch.empty(16, 16, requires_grad=True)
        inputs = torch.empty(64, 16, requires_grad=True)
        with torch.autocast("cpu", dtype=BF16):
            output = checkpoint(block, inputs, weight, use_reentrant=False)
        forward = sum(kernel.flops * count for kernel, count in trace.kernels.items())
        output.float().sum().backward()
        # Twice for the forward pass; the backward pass of attention 2.5 times, of the linear layer twice.
        attention, linear = 4 * 64 * 64 * 16, 2 * 64 * 16 * 16
        assert forward == attention + linear
        counted = sum(kernel.flops * count for kernel, count in trace.kernels.items())
        assert counted == 2 * forward + attention * 5 // 2 + 2 * linear
        del weight, inputs, output


class Waves(nn.Module):
    """A block of which a compiler computes the element-wise part again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, values: Tensor, scale: float) -> Tensor:
        return values + self.down((self.up(values).cos().sin() * scale).exp())


def test_compiled_blocks_keep_no_more_than_products():
    kept = []
    for compiles in (False, True):
        with followed() as trace:
            model = nn.ModuleList([Waves(), Waves()])
            excluded(trace, model)
            if compiles:
                keep_what_a_compiler_keeps(list(model))
            values = torch.empty(64, 64, requires_grad=True)
            trace.exclude([values])
            trace.restart()
            for block in model:
                values = block(values, scale=0.5)
            kept.append(trace.alive)
            values.sum().backward()
            assert all(weight.grad is not None for weight in model.parameters())
            del values, model
    # [64, 256] takes 64 KiB. Uncompiled, a block keeps it three times: what cos, sin and exp need. A compiler computes
    # the sine's input again. Two blocks' outputs of 16 KiB are there too, and a graph may hold one of them twice.
    uncompiled, compiled = kept
    assert uncompiled == (2 * 3 * 64 + 2 * 16) * KIB
    assert (2 * 2 * 64 + 2 * 16) * KIB <= compiled <= (2 * 2 * 64 + 3 * 16) * KIB
