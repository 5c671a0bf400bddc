"""Recomputing activations in the backward pass, of models of transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from distiller.errors import UserError


def enable_checkpointing(model: Any) -> None:
    """Makes the model's blocks recompute their activations in the backward pass (`torch.utils.checkpoint`).

    Sets the attributes of each block, since the model's own method has another name in each version of transformers.
    Raises UserError for a model whose blocks cannot recompute.
    """
    blocks: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise UserError(
            f"train.gradient_checkpointing is true and the blocks of {type(model).__name__} cannot recompute their "
            "activations; set it to false"
        )
    for block in blocks:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
