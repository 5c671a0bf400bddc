"""Compiles the blocks of a model, each around its own forward pass, so that hooks between them stay outside."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shutil
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

from distiller.errors import UserError

MIN_UPDATES = 500
"""Updates of a run from which on `auto` compiles. Compiling takes about ten seconds a model and kind of block; where
that matters beside the run, an update then saves tens of milliseconds."""

INNER_FORWARD = "inner_forward"
"""A block whose `forward` does work on the host, which no compiler takes, calls this method for all the rest."""

MAX_VARIANTS = 64
"""Versions of one forward function that are kept: one for each kind of block, dtype and device."""

MIN_CAPABILITY = (7, 0)
"""Compute capability of a GPU for which Triton makes code."""

LOOPS = re.compile(r"Mamba|Recurrent|Rglru|DeltaNet|Rwkv|xLSTM|LightningAttention|(?-i:SSM)", re.IGNORECASE)
"""Classes of layers that loop over positions: compiled, each length is a graph of its own, of thousands of nodes."""


def compile_mode(asked: str, device: torch.device, num_updates: int, key: str = "train.compile") -> str:
    """A recipe's `compile`, with `auto` replaced by `default` on a GPU in a run of `MIN_UPDATES` or more, or `none`.

    Raises UserError where a mode is asked for, by the recipe's `key`, on a GPU for which nothing can be compiled.
    """
    if asked == "none" or (asked == "auto" and (device.type != "cuda" or num_updates < MIN_UPDATES)):
        return "none"
    why_not = why_no_compiler(device)
    if why_not and asked != "auto":
        raise UserError(f"{key} is {asked} and {why_not}; leave it out, or set it to none")
    if asked != "auto":
        return asked
    return "none" if why_not else "default"


def why_no_compiler(device: torch.device) -> str:
    """Why torch.compile cannot make code for the device on this machine; an empty text where it can."""
    if device.type != "cuda":
        return ""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than what triton makes code for"
    compilers = (os.environ.get("CC") or "cc", "cc", "gcc", "clang")
    if not any(shutil.which(name) for name in compilers):
        return "triton finds no C compiler (gcc or clang)"
    return ""


def loops_over_positions(block: nn.Module) -> bool:
    """Whether a layer inside works through positions one after the other (state space models and other recurrences)."""
    return any(LOOPS.search(type(module).__name__) for module in block.modules())


def compile_blocks(
    blocks: Iterable[nn.Module], mode: str, *, sizes_vary: bool = False, moves_weights: bool = True
) -> None:
    """Replaces the forward pass of each block by a compiled one; the first pass of each kind compiles, for seconds.

    Blocks of one class share the compiled code: weights are its inputs, so what matters is their shape, dtype and
    device, not where in memory they are. Other memory may be bound to a block before each pass, and nothing is compiled
    again. What runs before and after a block's forward pass (hooks that copy weights, gather shards, take locks or read
    features) is not part of the code. Which code runs depends on the sizes of the inputs alone, not on the sizes before
    them: a resumed run, which begins in the middle, runs the code of the unbroken one.

    Args:
        blocks: with or without weights. Those that transformers checkpoints inside their forward pass must have been
            wrapped by the engine already: it changes their class, by which that code finds out what is outermost.
        mode: of `torch.compile`; `none` changes nothing.
        sizes_vary: sizes of the inputs are arguments of one code. Otherwise each set of sizes has its own code, which
            took 2% less time in a Wan transformer of 14 B parameters.
        moves_weights: whether a block's weights change their place. CUDA graphs, which need them in one place, are then
            left out of `max-autotune`.
    """
    if mode == "none":
        return
    if mode == "max-autotune" and moves_weights:
        mode = "max-autotune-no-cudagraphs"
    config: Any = torch._dynamo.config
    # DDP's buckets need no cuts inside a block: its gradients are ready together, while earlier blocks still compute.
    config.optimize_ddp = False
    # None, torch's default, would make code for the first sizes alone and, once they change, for all.
    options: dict[str, Any] = {"mode": mode, "dynamic": sizes_vary}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        # Of this call in all threads, and apart from other models whose blocks run the same function.
        options |= {"recompile_limit": MAX_VARIANTS, "isolate_recompiles": True}
    else:
        config.recompile_limit = max(config.recompile_limit, MAX_VARIANTS)
    compiled: dict[Any, Any] = {}
    for block in blocks:
        attribute = INNER_FORWARD if hasattr(block, INNER_FORWARD) else "forward"
        function = getattr(block, attribute).__func__
        if function not in compiled:
            compiled[function] = torch.compile(function, **options)
        # A method, so that a deep copy of the block has one of its own.
        setattr(block, attribute, MethodType(compiled[function], block))
