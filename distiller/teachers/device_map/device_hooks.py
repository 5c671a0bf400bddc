"""Hooks, in Accelerate's form, that copy inputs to the device of each module partition, and offloaded weights too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from distiller.teachers.device_map.gpu_ticket_lock import GpuTicketLock
from distiller.teachers.device_map.maps import Location
from distiller.teachers.device_map.module_partition import ModulePartition
from distiller.teachers.weights.layout import Binding, Unit, move_own_buffers


@final
class DeviceCopies:
    """Copies tensors to devices; a tensor that several blocks need (text, timestep) is copied once for each device.

    Accelerate's own hook copies it for every block. A copy lives as long as its original, and is made again if one of
    the two has been written to. From GPU to GPU the host does not wait: copies are in order with both devices' current
    streams.
    """

    def __init__(self) -> None:
        self._copies = WeakTensorKeyDictionary()

    def copy_to(self, data: Any, device: torch.device) -> Any:
        """`data` with all tensors in nested tuples, lists and dicts on the device, copied where necessary."""
        return recursively_apply(self._copy_tensor, data, device)

    def _copy_tensor(self, tensor: Tensor, device: torch.device) -> Tensor:
        if tensor.device == device:
            return tensor
        if tensor.is_inference():
            # An inference tensor has no version counter, so a write to it would not be noticed.
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


@final
class OnloadedWeights:
    """Tensors that are on the device only while their module runs; on the meta device at all other times."""

    def __init__(self, module: nn.Module, unit: Unit, copy_in: Callable[[], Tensor]) -> None:
        """`copy_in` returns the unit's bytes (uint8) on the device; only this object keeps a reference to them."""
        self._module, self._unit, self._copy_in = module, unit, copy_in
        self._meta_binding = Binding(module, unit)

    def onload(self) -> None:
        """Copies them to the device and sets them in the module."""
        Binding(self._module, self._unit, self._copy_in()).bind()

    def offload(self) -> None:
        """Sets meta tensors in the module; the allocator frees the memory after the kernels queued so far."""
        self._meta_binding.bind()


@final
class DeviceHook(ModelHook):
    """Before a partition runs, moves its inputs to a device and onloads its weights; afterwards moves its outputs.

    Unlike Accelerate's `AlignDevicesHook` it never replaces resident weights, which are views of memory that all ranks
    share, and it onloads the others as one run of bytes instead of tensor by tensor.
    """

    def __init__(
        self,
        copies: DeviceCopies,
        device: torch.device,
        output_device: torch.device | None,
        weights: OnloadedWeights | None,
        ticket_lock: GpuTicketLock | None,
    ) -> None:
        """`output_device` None: outputs stay on `device`. `weights` None: all weights are resident."""
        self._copies, self._device, self._output_device = copies, device, output_device
        self._weights, self._ticket_lock = weights, ticket_lock

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self._weights is not None:
            self._weights.onload()
        inputs = self._copies.copy_to(args, self._device), self._copies.copy_to(kwargs, self._device)
        if self._ticket_lock is not None:
            self._ticket_lock.acquire(self._device)
        return inputs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self._ticket_lock is not None:
            self._ticket_lock.finish_part(self._device)
        if self._weights is not None:
            self._weights.offload()
        return output if self._output_device is None else self._copies.copy_to(output, self._output_device)


def attach_hooks(
    module: nn.Module,
    partitions: Sequence[ModulePartition],
    device_of: Callable[[Location], torch.device],
    onloaded: Mapping[str, OnloadedWeights],
    copies: DeviceCopies,
    ticket_lock: GpuTicketLock | None = None,
) -> None:
    """Makes each partition compute on its device. `onloaded`: a partition's path -> its weights that are not resident.

    Buffers that are not saved move to their partition's device. With `ticket_lock`, a partition on a GPU that has no
    other partition inside it runs under that GPU's lock.
    """
    for partition in partitions:
        prefix = f"{partition.path}." if partition.path else ""
        has_inner = any(other is not partition and other.path.startswith(prefix) for other in partitions)
        takes_lock = ticket_lock is not None and isinstance(partition.location, int) and not has_inner
        submodule, device = module.get_submodule(partition.path), device_of(partition.location)
        output_device = None if partition.output_location is None else device_of(partition.output_location)
        # Outer partitions come first, and those inside them then move their own buffers to their own devices.
        move_own_buffers(submodule, device)
        weights = onloaded.get(partition.path)
        hook = DeviceHook(copies, device, output_device, weights, ticket_lock if takes_lock else None)
        add_hook_to_module(submodule, hook)
