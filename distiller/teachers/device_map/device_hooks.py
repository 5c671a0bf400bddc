"""Hooks, in Accelerate's form, that bring inputs to where a part of a module computes, and weights where they pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from distiller.teachers.device_map.gpu_ticket_lock import GpuTicketLock
from distiller.teachers.device_map.maps import Location
from distiller.teachers.device_map.module_partition import ModulePartition
from distiller.teachers.weights.layout import Binding, Unit, move_own_buffers


class DeviceCopies:
    """Copies tensors to devices: one that several blocks get (text, timestep, rotary tables) once a device.

    Accelerate's own hook copies it for every block. A copy lives as long as its original, and is made anew when either
    was written to. Nothing waits on the host where both are GPUs: copies keep the order of both devices' streams.
    """

    def __init__(self) -> None:
        self._copies = WeakTensorKeyDictionary()

    def carry(self, data: Any, device: torch.device) -> Any:
        """The tensors in nested tuples, lists and dicts on the device; itself where they are there."""
        return recursively_apply(self._carry_one, data, device)

    def _carry_one(self, tensor: Tensor, device: torch.device) -> Tensor:
        if tensor.device == device:
            return tensor
        if tensor.is_inference():
            # Writing to such a tensor leaves no trace.
            return tensor.to(device)
        if tensor not in self._copies:
            self._copies[tensor] = {}
        copies: dict[torch.device, tuple[tuple[int, int], Tensor]] = self._copies[tensor]
        if device in copies:
            versions, copied = copies[device]
            if versions == (tensor._version, copied._version):
                return copied
        copied = tensor.to(device)
        copies[device] = (tensor._version, copied._version), copied
        return copied


class OnloadedWeights:
    """Tensors that are on the device only while their module runs; on the meta device at all other times."""

    def __init__(self, module: nn.Module, unit: Unit, onload: Callable[[], Tensor]) -> None:
        """`bring` returns the unit's bytes on the device; nothing else keeps them."""
        self._module, self._unit, self._load = module, unit, onload
        self._away = Binding(module, unit)

    def onload(self) -> None:
        """Lets the module have them."""
        Binding(self._module, self._unit, self._load()).bind()

    def offload(self) -> None:
        """Lets them go, once the device has used them."""
        self._away.bind()


class DeviceHook(ModelHook):
    """Moves inputs to a device, perhaps weights too, and outputs on to where they are wanted.

    Unlike Accelerate's `AlignDevicesHook` it never touches weights that lie in their place, which are views of memory
    that all ranks share, and brings the others as one run of bytes and not tensor by tensor.
    """

    def __init__(
        self,
        carrier: DeviceCopies,
        device: torch.device,
        outputs_to: torch.device | None,
        weights: OnloadedWeights | None,
        turns: GpuTicketLock | None,
    ) -> None:
        self._carrier, self._device, self._outputs_to, self._weights = carrier, device, outputs_to, weights
        self._turns = turns

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self._weights is not None:
            self._weights.onload()
        here = self._carrier.carry(args, self._device), self._carrier.carry(kwargs, self._device)
        if self._turns is not None:
            self._turns.enter(self._device)
        return here

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self._turns is not None:
            self._turns.leave(self._device)
        if self._weights is not None:
            self._weights.offload()
        return output if self._outputs_to is None else self._carrier.carry(output, self._outputs_to)


def attach_hooks(
    module: nn.Module,
    places: Sequence[ModulePartition],
    device_of: Callable[[Location], torch.device],
    passing: Mapping[str, OnloadedWeights],
    carrier: DeviceCopies,
    turns: GpuTicketLock | None = None,
) -> None:
    """Lets each place compute where it lies. `passing` are the weights that come in, by the place's path.

    Buffers that are not saved go where their place is. A place without others inside it waits for the pass's turn on
    its GPU, when `turns` are taken.
    """
    for place in places:
        prefix = f"{place.path}." if place.path else ""
        has_others = any(other is not place and other.path.startswith(prefix) for other in places)
        takes_turns = turns is not None and isinstance(place.location, int) and not has_others
        submodule, device = module.get_submodule(place.path), device_of(place.location)
        outputs_to = None if place.outputs_to is None else device_of(place.outputs_to)
        # Places come before those inside them, which then move theirs on.
        move_own_buffers(submodule, device)
        hook = DeviceHook(carrier, device, outputs_to, passing.get(place.path), turns if takes_turns else None)
        add_hook_to_module(submodule, hook)
