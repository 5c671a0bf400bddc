"""Block outputs of a network, for feature matching."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn


def block_hidden(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The hidden states [B, L, H] among the outputs of a language model's block, some of which return tuples."""
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def capture_outputs(blocks: Sequence[tuple[str, nn.Module]]) -> Iterator[dict[str, Tensor]]:
    """Collects what the named modules return in one forward pass of this thread.

    Under activation checkpointing the outputs are those of the first forward; recomputation happens after the context
    has closed and adds nothing.
    """
    captured: dict[str, Tensor] = {}
    thread = threading.get_ident()

    def keep(name: str):
        def hook(module: nn.Module, args: object, output: Tensor) -> None:
            # A streamed teacher's micro-batches share the module, each in a thread of its own.
            if threading.get_ident() == thread:
                captured[name] = output

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in blocks]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
