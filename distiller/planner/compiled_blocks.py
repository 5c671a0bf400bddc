"""What compiled blocks keep for their backward pass: torch's own partition of their graphs, on tensors without data."""

# functorch exports these names lazily.
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

_TENSOR = object()
"""Stands for a tensor among the leaves of a block's arguments."""


def keep_what_a_compiler_keeps(blocks: Sequence[nn.Module]) -> None:
    """Changes the blocks' forward passes, in place, so that they save what the default compiler would have them save.

    inductor divides the graph of forward and backward pass where the least bytes cross, and computes the rest again
    (`min_cut_rematerialization_partition`). The graphs run operation by operation here. Blocks of one class with
    parameters of the same shapes share one graph, which is made at their first pass: their inputs must not change.
    """
    graphs: dict[Any, _BlockGraph] = {}
    for block in blocks:
        shapes = tuple((name, tensor.shape) for name, tensor in block.named_parameters())
        graph = graphs.setdefault((type(block), shapes), _BlockGraph(block))
        block.forward = _bound(graph, block)


def _bound(graph: _BlockGraph, block: nn.Module) -> Callable[..., Any]:
    return lambda *args, **kwargs: graph.run(block, args, kwargs)


@final
class _BlockGraph:
    """The graph of one kind of block."""

    def __init__(self, block: nn.Module) -> None:
        self._block, self._forward = block, block.forward
        self._names = [name for name, _ in (*block.named_parameters(), *block.named_buffers())]
        self._compiled = aot_function(self._run, nop, nop, min_cut_rematerialization_partition)
        self._leaves: list[Any] = []
        self._tree: Any = None

    def run(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's output; the graph takes its parameters and every tensor among the arguments."""
        leaves, self._tree = tree_flatten((args, kwargs))
        self._leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        own = [tensor for _, tensor in (*block.named_parameters(), *block.named_buffers())]
        return self._compiled(*own, *(leaf for leaf in leaves if isinstance(leaf, Tensor)))

    def _run(self, *tensors: Tensor) -> Any:
        own = dict(zip(self._names, tensors, strict=False))
        given = iter(tensors[len(self._names) :])
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._tree)
        replaced, self._block.forward = self._block.forward, self._forward
        try:
            return functional_call(self._block, own, args, kwargs)
        finally:
            self._block.forward = replaced
