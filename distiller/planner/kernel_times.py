"""How long operations take on a kind of GPU: products at its arithmetic rate, the rest at its memory's."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from distiller.planner.allocation_trace import Kernel
from distiller.planner.machines import Gpu

PRODUCT_SHARE, BANDWIDTH_SHARE = 0.80, 0.80
"""Shares of the data sheet's rates that large products and copies reach.

Chosen once so that the forward passes of docs/performance.md come out (Wan 14B at 1,560 to 32,760 tokens, Wan 1.3B,
Llama 8B, on one H200): within 7% of them uncompiled, and within 6% compiled.
"""
COMPILED_SHARE = 0.3
"""Of the bytes that operations other than products read and write, what is left once a compiler has merged them."""

LAUNCH_MS = 0.006
"""For each operation that is not compiled: what the host takes to start it. It bounds small models."""


def kernels_ms(kernels: Mapping[Kernel, int], gpu: Gpu, *, is_compiled: bool) -> float:
    """Milliseconds of all operations, one after the other."""
    total = 0.0
    for kernel, count in kernels.items():
        flops = gpu.float32_flops if kernel.dtype is torch.float32 else gpu.short_flops
        share = 1.0 if kernel.flops or not is_compiled else COMPILED_SHARE
        seconds = kernel.flops / (flops * PRODUCT_SHARE) + kernel.num_bytes * share / (gpu.bandwidth * BANDWIDTH_SHARE)
        total += count * seconds * 1e3
    started = sum(count for kernel, count in kernels.items() if kernel.flops or not is_compiled)
    return max(total, started * LAUNCH_MS)
