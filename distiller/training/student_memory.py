"""Predicted memory of the student's state on one rank, in bytes, and of its engine's buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from distiller.config.recipe import Recipe
from distiller.launch.student_layout import StudentLayout

WEIGHTS, GRADIENTS, MOMENTS = 4, 4, 8
"""Bytes for each parameter: float32 weights, their gradients, AdamW's two moments."""

REDUCED_AT_ONCE, KEPT_GATHERED = 500_000_000, 1_000_000_000
"""DeepSpeed's defaults: elements of a bucket of gradients (`reduce_bucket_size`), and of gathered weights that ZeRO-3
keeps for the next use (`stage3_max_live_parameters`, `stage3_max_reuse_distance`)."""


@final
@dataclass(frozen=True)
class StudentState:
    """Bytes of one rank. Gradients are there from the first backward pass of an update to its step.

    Attributes:
        weights, gradients, optimizer: on its GPU; the moving average counts as the optimizer's.
        buffers: on its GPU, of the engine: copies of gradients or weights on their way between ranks.
        host: of offloaded state, and of a checkpoint's copy.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    host: int

    @property
    def gpu(self) -> int:
        """All that lies on the GPU."""
        return self.weights + self.gradients + self.optimizer + self.buffers


def student_state(num_parameters: int, recipe: Recipe, layout: StudentLayout) -> StudentState:
    """The state of a student of so many trained parameters on each rank.

    ZeRO shards moments, then gradients, then weights (Rajbhandari et al. 2020, section 5). FSDP shards all three, but
    keeps whole gradients from the first micro-batch of an update to its last. With DeepSpeed's optimizer, gradients and
    weights (DeepSpeedCPUAdam's copy) are offloaded too. The moving average is on the device of the weights that it
    follows. Buffers through which state on a disk passes are not counted.
    """
    average = WEIGHTS * (recipe.train.ema_decay is not None) / layout.num_processes
    if layout.fsdp is not None:
        weights, gradients, optimizer, buffers = _under_fsdp(layout)
    elif layout.zero_stage is not None:
        weights, gradients, optimizer, buffers = _under_zero(num_parameters, layout, layout.zero_stage)
    else:
        weights, gradients, optimizer = WEIGHTS, GRADIENTS, MOMENTS
        # DDP sums gradients in buckets, and Accelerate lets it keep them beside the gradients.
        buffers = GRADIENTS if layout.engine == "ddp" else 0
    is_offloaded = layout.fsdp.offloads if layout.fsdp is not None else layout.offload.optimizer != "none"
    optimizer += 0 if is_offloaded else average
    return StudentState(
        weights=int(num_parameters * weights),
        gradients=int(num_parameters * gradients),
        optimizer=int(num_parameters * optimizer),
        buffers=int(num_parameters * buffers),
        host=_host_bytes(num_parameters, layout, average, is_offloaded),
    )


def _under_fsdp(layout: StudentLayout) -> tuple[float, float, float, float]:
    """Bytes for each parameter: weights, gradients, optimizer, buffers."""
    assert layout.fsdp is not None
    share = layout.fsdp.num_replicas / layout.num_processes
    on_gpu = 0 if layout.fsdp.offloads else share
    weights = WEIGHTS * (on_gpu + (not layout.fsdp.shards_weights))
    gradients = GRADIENTS * (on_gpu + (layout.accumulation_steps > 1))
    return weights, gradients, MOMENTS * on_gpu, 0.0


def _under_zero(num_parameters: int, layout: StudentLayout, stage: int) -> tuple[float, float, float, float]:
    """Bytes for each parameter: weights, gradients, optimizer with its float32 weights, buffers."""
    share, width = 1 / layout.num_processes, float(layout.weights_dtype.itemsize)
    reduced = min(REDUCED_AT_ONCE / max(num_parameters, 1), 1.0) * width
    offload = layout.offload
    weights = width if stage < 3 else width * share * (offload.parameters == "none")
    gradients = width if stage == 1 else width * share
    buffers = 2 * reduced if stage == 1 else 0.0
    if stage == 3:
        gathered = min(KEPT_GATHERED / max(num_parameters, 1), 1.0) * width
        buffers = gathered + reduced * (not offload.is_any)
    if offload.optimizer != "none":
        return weights, 0.0, 0.0, buffers
    return weights, gradients, (WEIGHTS + MOMENTS) * share, buffers


def _host_bytes(num_parameters: int, layout: StudentLayout, average: float, is_offloaded: bool) -> int:
    """Float32 shards of what is offloaded, and a checkpoint's copy of the rank's share."""
    count = layout.num_processes
    held = average * is_offloaded + (WEIGHTS + MOMENTS) / count + average
    if layout.fsdp is not None:
        held += (WEIGHTS + GRADIENTS + MOMENTS) * layout.fsdp.offloads * layout.fsdp.num_replicas / count
    else:
        held += (WEIGHTS + GRADIENTS + MOMENTS) * (layout.offload.optimizer == "cpu") / count
        held += WEIGHTS * (layout.offload.parameters == "cpu") / count
    return int(num_parameters * held)
