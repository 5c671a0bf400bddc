"""Compiles the blocks of a model, each around its own forward pass, so that hooks between them stay outside."""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

MIN_UPDATES = 500
"""Updates of a run that `auto` compiles for. A block compiles in seconds, some ten in all; an update of a model whose
blocks take long enough to matter then takes tens of milliseconds less."""

INNER_FORWARD = "inner_forward"
"""A block whose `forward` does work on the host, which no compiler takes, calls this method for all the rest."""

MAX_VARIANTS = 64
"""Versions of one class's block that are kept: one for each kind of block, dtype and set of shapes."""


def compile_mode(asked: str, device: torch.device, num_updates: int) -> str:
    """A recipe's `compile`, with `auto` replaced by `default` on a GPU in a run of `MIN_UPDATES` or more, or `none`."""
    if asked != "auto":
        return asked
    return "default" if device.type == "cuda" and num_updates >= MIN_UPDATES else "none"


def compile_blocks(blocks: Iterable[nn.Module], mode: str, moves_weights: bool = True) -> None:
    """Replaces the forward pass of each block by a compiled one; the first pass of each shape compiles, for seconds.

    Blocks of one class share the compiled code: weights are its inputs, so what matters is their shape and dtype, not
    where they are. Other memory may be bound to a block before each pass, and nothing is compiled again. What runs
    before and after a block's forward pass (hooks that copy weights, gather shards, take locks or read features) is not
    part of the compiled code. A size that has changed once becomes an argument of the code.

    Args:
        blocks: with or without weights, before hooks are attached to them and before an engine wraps them.
        mode: of `torch.compile`; `none` changes nothing.
        moves_weights: whether a block's weights change their place. CUDA graphs, which need them in one place, are then
            left out of `max-autotune`.
    """
    if mode == "none":
        return
    if mode == "max-autotune" and moves_weights:
        mode = "max-autotune-no-cudagraphs"
    # Beyond its limit the compiler would run a block as it is, without a word.
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MAX_VARIANTS)
    compiled: dict[Any, Any] = {}
    for block in blocks:
        attribute = INNER_FORWARD if hasattr(block, INNER_FORWARD) else "forward"
        function = getattr(block, attribute).__func__
        if function not in compiled:
            compiled[function] = torch.compile(function, mode=mode)
        # A method, so that a deep copy of the block has one of its own.
        setattr(block, attribute, MethodType(compiled[function], block))
