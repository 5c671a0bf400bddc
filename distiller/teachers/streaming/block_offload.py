"""Modules whose blocks pass through a ring: hooks that bring each block's weights in before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distiller.teachers.base import ModuleCalls, Network, Outputs
from distiller.teachers.streaming.buffer_pool import BlockBuffer, BufferPool, Copier
from distiller.teachers.streaming.interleaved_forward import InterleavedForward
from distiller.teachers.weights.layout import Binding, Unit


@dataclass(frozen=True)
class OffloadedBlock:
    """A block that passes: its module's name, the module that holds it, and its layout."""

    module_name: str
    module: nn.Module
    unit: Unit


class OffloadedModules:
    """Runs calls on modules of which some blocks are in the ring only while they compute.

    A block's weights are on the meta device whenever it is not running, so using them at any other time is an error and
    not a wrong number.
    """

    def __init__(
        self,
        network: Network,
        modules: dict[str, nn.Module],
        units: Sequence[OffloadedBlock],
        slots: Sequence[BlockBuffer],
        feed: Copier,
        device: torch.device,
        amortise: bool,
    ) -> None:
        self._network, self._modules, self._amortise = network, modules, amortise
        self._units: Sequence[OffloadedBlock] = units
        self._pool, self._interleaved, self._num_slots = BufferPool(slots, feed), InterleavedForward(device), len(slots)
        self._bindings: dict[tuple[int, int], Binding] = {}
        self._handles = []
        for number, passing in enumerate(units):
            block = passing.module.get_submodule(passing.unit.name)
            self._handles.append(block.register_forward_pre_hook(self._onload(number)))
            self._handles.append(block.register_forward_hook(self._offload(number), always_call=True))

    def run(self, agenda: ModuleCalls) -> list[list[Outputs]]:
        """Outputs of each call; with `amortise`, the calls of a module pass each block together."""
        route = []
        for name, calls in agenda:
            numbers = [number for number, passing in enumerate(self._units) if passing.module_name == name]
            route += numbers * (1 if self._amortise else len(calls))
        # The next step is likely to begin as this one did.
        self._pool.schedule(route, then=route[: self._num_slots])
        results = []
        for name, calls in agenda:
            module = self._modules[name]
            passes = [lambda call=call, module=module: self._network.run(module, call) for call in calls]
            groups = [passes] if self._amortise else [[one] for one in passes]
            results.append([outputs for group in groups for outputs in self._interleaved.run(group)])
        self._pool.release()
        return results

    def close(self) -> None:
        """Waits for copies under way, and lets modules and buffers go."""
        self._pool.close()
        self._interleaved.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._modules.clear()
        self._bindings.clear()
        self._units = ()

    def _onload(self, number: int):
        def hook(block: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._interleaved.switch()
            slot = self._pool.acquire(number)
            key = number, slot.buffer.data_ptr()
            if key not in self._bindings:
                passing = self._units[number]
                self._bindings[key] = Binding(passing.module, passing.unit, slot.buffer)
            self._bindings[key].bind()

        return hook

    def _offload(self, number: int):
        passing = self._units[number]
        away = Binding(passing.module, passing.unit)

        def hook(block: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            away.bind()

        return hook


def allocate_buffers(num_bytes: int, num_slots: int, device: torch.device) -> list[BlockBuffer]:
    """Buffers of this size on the device."""
    return [
        BlockBuffer(
            torch.empty(num_bytes, dtype=torch.uint8, device=device),
            used=torch.cuda.Event() if device.type == "cuda" else None,
        )
        for _ in range(num_slots)
    ]
