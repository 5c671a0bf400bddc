"""Predicted memory of the student's state, on one rank's GPU and in host memory, in bytes."""

from __future__ import annotations

from distiller.config.recipe import Recipe
from distiller.launch.accelerator import World

WEIGHTS, GRADIENTS, MOMENTS = 4, 4, 8
"""Bytes for each parameter: float32 weights, their gradients, AdamW's two moments."""


def gpu_bytes(num_parameters: int, recipe: Recipe, world: World) -> int:
    """On one rank's GPU: weights, gradients and moments as the engine shards them, and the moving average.

    ZeRO shards moments, then gradients, then weights (Rajbhandari et al. 2020, section 5). FSDP shards all three, but
    keeps whole gradients from the first micro-batch of an update to its last.
    """
    count, average = world.accelerator.num_processes, _average_bytes(recipe)
    if world.fsdp is not None:
        held = 0 if world.fsdp.offloads else WEIGHTS + GRADIENTS + MOMENTS + average
        gathered = WEIGHTS * (not world.fsdp.shards_weights) + GRADIENTS * (world.accumulation_steps > 1)
        return int(num_parameters * (held * world.fsdp.num_replicas / count + gathered))
    shards = {"deepspeed-zero1": (1, 1, 0), "deepspeed-zero2": (1, 0, 0), "deepspeed-zero3": (0, 0, 0)}
    whole = shards.get(world.engine.removesuffix("-offload"), (1, 1, 1))
    if world.offload.is_any:
        weights = whole[0] + (world.offload.parameters == "none") * (1 - whole[0]) / count
        # Parameters may be offloaded without the optimizer, which holds float32 masters, gradients and moments.
        optimizers = (WEIGHTS + GRADIENTS + MOMENTS + average) / count * (world.offload.optimizer == "none")
        return int(num_parameters * (WEIGHTS * weights + optimizers))
    parts = zip((WEIGHTS, GRADIENTS, MOMENTS), whole, strict=True)
    bytes_of_parameter = sum(width if is_whole else width / count for width, is_whole in parts)
    return int(num_parameters * (bytes_of_parameter + average / count))


def host_bytes(num_parameters: int, recipe: Recipe, world: World) -> int:
    """In host memory for one rank: float32 shards of what is offloaded, and a checkpoint's copy of the rank's share.

    With DeepSpeed's optimizer, gradients and weights (DeepSpeedCPUAdam's copy) are offloaded too. The moving average is
    on the device of the weights that it follows. Buffers through which state on a disk passes are not counted.
    """
    count, average = world.accelerator.num_processes, _average_bytes(recipe)
    snapshot = (WEIGHTS + MOMENTS + average) / count
    if world.fsdp is not None:
        held = (WEIGHTS + GRADIENTS + MOMENTS + average) * world.fsdp.offloads * world.fsdp.num_replicas
    else:
        held = (WEIGHTS + GRADIENTS + MOMENTS) * (world.offload.optimizer == "cpu")
        held += WEIGHTS * (world.offload.parameters == "cpu") + average * (world.offload.optimizer != "none")
    return int(num_parameters * (held / count + snapshot))


def _average_bytes(recipe: Recipe) -> int:
    return WEIGHTS * (recipe.train.ema_decay is not None)
