"""Modules whose blocks are offloaded: hooks copy each block's weights into a pool buffer before it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from distiller.teachers.base import ModuleCalls, Network, Outputs
from distiller.teachers.streaming.buffer_pool import BlockBuffer, BufferPool, Copier
from distiller.teachers.streaming.interleaved_forward import InterleavedForward
from distiller.teachers.weights.layout import Binding, Unit


@final
@dataclass(frozen=True)
class OffloadedBlock:
    """A block that is on the device only while it runs: the name of its module, the module, and the block's layout."""

    module_name: str
    module: nn.Module
    unit: Unit


@final
class OffloadedModules:
    """Runs calls on modules of which some blocks are in the buffer pool only while they compute.

    A block's weights are on the meta device whenever it is not running, so using them at any other time raises an error
    and does not give wrong numbers.
    """

    def __init__(
        self,
        network: Network,
        modules: dict[str, nn.Module],
        blocks: Sequence[OffloadedBlock],
        buffers: Sequence[BlockBuffer],
        copier: Copier,
        device: torch.device,
        amortise: bool,
    ) -> None:
        """`copier` copies unit i, which is the weights of `blocks[i]`, into one of `buffers`, which are on `device`."""
        self._network, self._modules, self._amortise = network, modules, amortise
        self._blocks: Sequence[OffloadedBlock] = blocks
        self._pool, self._num_buffers = BufferPool(buffers, copier), len(buffers)
        self._interleaved = InterleavedForward(device)
        self._bindings: dict[tuple[int, int], Binding] = {}
        self._handles: list[RemovableHandle] = []
        for i, block in enumerate(blocks):
            submodule = block.module.get_submodule(block.unit.name)
            self._handles.append(submodule.register_forward_pre_hook(self._onload_hook(i)))
            self._handles.append(submodule.register_forward_hook(self._offload_hook(i), always_call=True))

    def prefetch(self, module_name: str, num_blocks: int) -> None:
        """Begins to copy the module's first blocks, for a forward pass outside of `run`."""
        self._pool.release()
        self._pool.schedule(self._units(module_name)[:num_blocks], then=())

    def run(self, agenda: ModuleCalls) -> list[list[Outputs]]:
        """Outputs of each call. With `amortise`, all calls of a module run a block before any runs the next block."""
        schedule: list[int] = []
        for name, calls in agenda:
            schedule += self._units(name) * (1 if self._amortise else len(calls))
        # The next `run` probably begins with the same units as this one.
        self._pool.schedule(schedule, then=schedule[: self._num_buffers])
        results = []
        for name, calls in agenda:
            module = self._modules[name]
            passes = [lambda call=call, module=module: self._network.run(module, call) for call in calls]
            groups = [passes] if self._amortise else [[single_pass] for single_pass in passes]
            results.append([outputs for group in groups for outputs in self._interleaved.run(group)])
        self._pool.release()
        return results

    def close(self) -> None:
        """Waits for copies in flight, and drops the references to modules and buffers."""
        self._pool.close()
        self._interleaved.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._modules.clear()
        self._bindings.clear()
        self._blocks = ()

    def _units(self, module_name: str) -> list[int]:
        return [i for i, block in enumerate(self._blocks) if block.module_name == module_name]

    def _onload_hook(self, i: int) -> Callable[..., None]:
        def hook(submodule: nn.Module, args: tuple[Any, ...]) -> None:
            self._interleaved.switch()
            buffer = self._pool.acquire(i)
            key = i, buffer.data.data_ptr()
            if key not in self._bindings:
                block = self._blocks[i]
                self._bindings[key] = Binding(block.module, block.unit, buffer.data)
            self._bindings[key].bind()

        return hook

    def _offload_hook(self, i: int) -> Callable[..., None]:
        block = self._blocks[i]
        meta_binding = Binding(block.module, block.unit)

        def hook(submodule: nn.Module, args: tuple[Any, ...], output: object) -> None:
            meta_binding.bind()

        return hook


def allocate_buffers(num_bytes: int, num_buffers: int, device: torch.device) -> list[BlockBuffer]:
    """Uninitialised buffers of this size on the device."""
    return [
        BlockBuffer(
            torch.empty(num_bytes, dtype=torch.uint8, device=device),
            last_use=torch.cuda.Event() if device.type == "cuda" else None,
        )
        for _ in range(num_buffers)
    ]
