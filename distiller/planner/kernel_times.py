"""How long operations take on a kind of GPU: products at its arithmetic rate, the rest at its memory's."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from distiller.launch.student_layout import StudentLayout
from distiller.planner.allocation_trace import Kernel
from distiller.planner.machines import Gpu
from distiller.training.student_memory import StudentState

PRODUCT_SHARE, BANDWIDTH_SHARE = 0.80, 0.80
"""Shares of the data sheet's rates that large products and copies reach.

Chosen once so that the forward passes of docs/performance.md come out (Wan 14B at 1,560 to 32,760 tokens, Wan 1.3B,
Llama 8B, on one H200): within 7% of them uncompiled, and within 6% compiled.
"""
HOST_BYTES = 28
"""For each parameter of which a rank holds offloaded state: weights, gradient, moments, and a checkpoint's copy."""

COMPILED_SHARE = 0.3
"""Of the bytes that operations other than products read and write, what is left once a compiler has merged them."""

LAUNCH_MS = 0.018
"""For each operation that is not compiled: what the host takes to start it. It bounds small models."""


CPU_OPTIMIZER = 20e9
"""Bytes a second with which a rank's optimizer steps in host memory (docs/performance.md, two ranks on 32 cores)."""


def kernels_ms(kernels: Mapping[Kernel, int], gpu: Gpu, *, is_compiled: bool, product_speed: float = 1.0) -> float:
    """Milliseconds of all operations, one after the other; products run `product_speed` times as fast."""
    total = 0.0
    for kernel, count in kernels.items():
        flops = gpu.float32_flops if kernel.dtype is torch.float32 else gpu.short_flops
        share = 1.0 if kernel.flops or not is_compiled else COMPILED_SHARE
        seconds = kernel.flops / (flops * PRODUCT_SHARE * product_speed) + kernel.num_bytes * share / (
            gpu.bandwidth * BANDWIDTH_SHARE
        )
        total += count * seconds * 1e3
    started = sum(count for kernel, count in kernels.items() if kernel.flops or not is_compiled)
    return max(total, started * LAUNCH_MS)


def optimizer_ms(state: StudentState, layout: StudentLayout, gpu: Gpu) -> float:
    """Milliseconds of what follows the backward pass: the gradient's norm, AdamW, and copies of offloaded state.

    What an engine exchanges between ranks is taken to pass while the backward pass computes.
    """
    if state.optimizer:
        # Weights, moments and gradients are read, the first two written, and gradients read and scaled before.
        moved = 2 * (state.weights + state.optimizer) + 3 * state.gradients
        return moved / (gpu.bandwidth * BANDWIDTH_SHARE) * 1e3
    # Gradients to the host and weights back, in 32 bits; the CPU's AdamW reads and writes 28 bytes a parameter.
    num_parameters = state.host / HOST_BYTES
    return num_parameters * (8 / gpu.host + 28 / CPU_OPTIMIZER) * 1e3
