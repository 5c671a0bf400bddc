"""What a computation allocates and computes, observed operation by operation on tensors without data."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

ALLOCATION_STEP = 512
"""Bytes to whose multiples torch's caching allocator rounds every request on a GPU."""


aten = torch.ops.aten
WITHOUT_WORK = (aten.new_empty, aten.empty_like, aten.new_empty_strided)
"""Operations that only allocate."""


class Kernel(NamedTuple):
    """An operation's work.

    Attributes:
        flops: of matrix products, convolutions and attention; 0 for other operations.
        num_bytes: read and written, each tensor once.
        dtype: of its first floating input.
    """

    flops: int
    num_bytes: int
    dtype: torch.dtype


@final
class AllocationTrace(TorchDispatchMode):
    """A mode that counts the bytes of storages that are alive, and the work of every operation.

    Use it inside a `FakeTensorMode`: shapes are computed, nothing else. A storage counts from the operation that makes
    it until nothing refers to it, in C++ (tensors saved for a backward pass) or in Python.

    Attributes:
        kernels: operation -> how often it ran.
        alive: bytes now, without what `exclude` was given.
        peak: the most that `alive` has been since `restart`.
        peak_without_gradients: the same without storages that `is_gradient` was given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[Kernel] = Counter()
        self.alive = self.peak = self.peak_without_gradients = 0
        self._gradients = 0
        self._sizes: dict[int, int] = {}
        self._is_one_kernel = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._count(func, args, kwargs, inputs, outputs, result)
        if not self._is_one_kernel:
            for output in outputs:
                self._add(output)
        return result

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Leaves these tensors' storages out of all figures: weights, and what the caller counts itself."""
        for tensor in tensors:
            self._add(tensor)
            key = _key(tensor)
            self.alive -= self._sizes[key]
            self._sizes[key] = 0

    def is_gradient(self, tensor: Tensor) -> None:
        """Counts the tensor's storage as a weight's gradient from now on."""
        key = _key(tensor)
        if key in self._sizes and self._sizes[key] > 0:
            self._gradients += self._sizes[key]
            self._sizes[key] = -self._sizes[key]

    def restart(self) -> None:
        """Forgets peaks and kernels; what is alive stays."""
        self.kernels = Counter()
        self.peak, self.peak_without_gradients = self.alive, self.alive - self._gradients

    def one_kernel(self, call: Callable[[], Any]) -> Any:
        """What `call` returns, whose tensors are all that it allocates; of its work only products are counted."""
        self._is_one_kernel = True
        try:
            result = call()
        finally:
            self._is_one_kernel = False
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        return result

    def add_kernel(self, kernel: Kernel) -> None:
        """Counts work that no single operation shows."""
        self.kernels[kernel] += 1

    def _count(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        inputs: list[Tensor],
        outputs: list[Tensor],
        result: Any,
    ) -> None:
        own = {_key(tensor) for tensor in inputs}
        is_view = all(_key(output) in own for output in outputs) and not func._schema.is_mutable
        packet = func._overloadpacket
        if is_view or not outputs or not inputs or packet in WITHOUT_WORK:
            return
        flops = int(flop_registry[packet](*args, **kwargs, out_val=result)) if packet in flop_registry else 0
        if self._is_one_kernel and not flops:
            return
        floating = next((tensor.dtype for tensor in inputs if tensor.is_floating_point()), torch.float32)
        distinct = {_key(tensor): tensor for tensor in inputs}
        num_bytes = sum(map(_bytes_used, distinct.values())) + sum(map(_bytes_used, outputs))
        self.kernels[Kernel(flops, num_bytes, floating)] += 1

    def _add(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key in self._sizes:
            return
        storage = tensor.untyped_storage()
        size = math.ceil(storage.nbytes() / ALLOCATION_STEP) * ALLOCATION_STEP
        self._sizes[key] = size
        weakref.finalize(storage, self._free, key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        self.peak_without_gradients = max(self.peak_without_gradients, self.alive - self._gradients)

    def _free(self, key: int) -> None:
        size = self._sizes.pop(key)
        self.alive -= abs(size)
        if size < 0:
            self._gradients += size


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes_used(tensor: Tensor) -> int:
    # An expanded tensor repeats what it holds.
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
