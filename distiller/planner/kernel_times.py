"""How long operations take on a kind of GPU: products at its arithmetic rate, the rest at its memory's."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from distiller.launch.student_layout import StudentLayout
from distiller.planner.allocation_trace import Kernel
from distiller.planner.gpus import DISK, Gpu
from distiller.training.student_memory import StudentState

FORWARD_SHARE, STUDENT_SHARE = 0.80, 0.69
"""Shares of the data sheet's rates, of arithmetic and of memory, that the teacher's forward passes reach, and the
student's passes with their backward. Found from docs/performance.md, on one H200; see docs/planning.md."""
COMPILED_SHARE = 0.3
"""Of the bytes that operations other than products read and write, what is left once a compiler has merged them."""

COMPILED_LAUNCH, OPTIMIZER_LAUNCH = 5.0, 1.5
"""How many operations' starts the host takes for a product with all that belongs to it in compiled blocks, and for each
tensor of parameters when gradients are clipped and the optimizer steps."""

CPU_OPTIMIZER = 20e9
"""Bytes a second with which a rank's optimizer steps in host memory (docs/performance.md, two ranks on 32 cores)."""


def kernels_ms(
    kernels: Mapping[Kernel, int], gpu: Gpu, *, is_compiled: bool, share: float, product_speed: float = 1.0
) -> float:
    """Milliseconds of all operations, one after the other.

    Args:
        share: of the GPU's rates that is reached.
        product_speed: how many times as fast products are, for quantised weights.
    """
    seconds = 0.0
    for kernel, count in kernels.items():
        flops = gpu.float32_flops if kernel.dtype is torch.float32 else gpu.short_flops
        moved = kernel.num_bytes * (1.0 if kernel.flops or not is_compiled else COMPILED_SHARE)
        seconds += count * (kernel.flops / (flops * product_speed) + moved / gpu.bandwidth) / share
    if is_compiled:
        started = COMPILED_LAUNCH * sum(count for kernel, count in kernels.items() if kernel.flops)
    else:
        started = sum(kernels.values())
    return max(seconds * 1e3, started * gpu.launch_ms)


def optimizer_ms(num_parameters: int, num_tensors: int, state: StudentState, layout: StudentLayout, gpu: Gpu) -> float:
    """Milliseconds of what follows the backward pass: the gradient's norm, AdamW, and copies of offloaded state.

    What an engine exchanges between ranks is taken to pass while the backward pass computes. `num_parameters`: of the
    whole student, in `num_tensors` tensors.
    """
    if state.optimizer:
        # Weights, moments and gradients are read, the first two written, and gradients read and scaled before.
        moved = 2 * (state.weights + state.optimizer) + 3 * state.gradients
        return max(moved / (gpu.bandwidth * FORWARD_SHARE) * 1e3, OPTIMIZER_LAUNCH * num_tensors * gpu.launch_ms)
    replicas = 1 if layout.fsdp is None else layout.fsdp.num_replicas
    own = num_parameters * replicas / layout.num_processes
    # Gradients to the host and weights back, in 32 bits; the CPU's AdamW reads and writes 28 bytes a parameter.
    seconds = own * (8 / gpu.host + 28 / CPU_OPTIMIZER)
    if layout.offload.is_on("nvme"):
        # Weights and moments are read and written.
        seconds += own * 24 / DISK
    return seconds * 1e3
