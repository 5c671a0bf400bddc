"""Base of `balanced`, `sequential` and `custom`: one copy of the teacher a node, spread over GPUs by a device map."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from accelerate.hooks import remove_hook_from_submodules
from torch import Tensor, nn

from distiller.config.placements.shared_options import FileReadingOptions, PinnedMemoryOptions
from distiller.config.teacher import Teacher as TeacherOptions
from distiller.distributed.devices import with_index
from distiller.teachers.base import Call, ModuleCalls, Network, Outputs, Request, Setup, Teacher, TeacherMemory, answer
from distiller.teachers.device_map.device_hooks import DeviceCopies, OnloadedWeights, attach_hooks
from distiller.teachers.device_map.gpu_ticket_lock import GpuTicketLock
from distiller.teachers.device_map.maps import DeviceMap, Location, Packing, budgets_of_devices
from distiller.teachers.device_map.module_partition import (
    ModulePartition,
    TensorGroup,
    onloaded_group,
    partition_module,
    resident_groups,
    separate_shared_names,
)
from distiller.teachers.quantization.modules import plan_quantized_modules
from distiller.teachers.streaming.copiers import FileReader
from distiller.teachers.weights.layout import REST, Binding, own_buffer_bytes
from distiller.teachers.weights.loading import ModulePlan, staging_buffer
from distiller.teachers.weights.shared_weights import SharedWeights

MakeMap = Callable[[nn.Module, Sequence[str], Mapping[int, int]], DeviceMap]
"""(module without weights, its blocks, bytes that each device number has for it) -> device map."""


@final
@dataclass(frozen=True)
class MapRule:
    """How a placement makes device maps. `given`: the recipe's map, for all modules; None if there is none."""

    make: MakeMap
    given: DeviceMap | None = None

    @property
    def allows_disk(self) -> bool:
        """Whether maps may place tensors on `disk`; if not, `disk` marks tensors that fit on no device."""
        return self.given is not None and "disk" in self.given.values()


class DeviceMapTeacher(Teacher):
    """Weights that the node's ranks share, and hooks with which each rank runs its own forward passes on them.

    A subclass gives the rule by which its maps are made.

    On GPUs: weights at a number are in that GPU's memory, which the node's first rank owns and the other ranks map.
    Weights at `cpu` are in host memory that all ranks map; each rank copies a block from there to its own GPU when the
    block runs. Weights at `disk` are read from the files when they are needed. Without GPUs the numbers stand for
    ranks, and all weights but those at `disk` are in the shared host memory.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        """Communicates. Raises UserError before any weight is read."""
        self._network, self._ranks, self._device = network, setup.ranks, with_index(setup.ranks.device)
        if self._device.type == "cuda":
            # Every rank computes on all GPUs: what one rank's allocator has cached, such as a text encoder's memory, is
            # not free for the others.
            torch.cuda.empty_cache()
        rule = self.map_rule(setup.options)
        is_reader = setup.ranks.is_local_main or rule.allows_disk
        plans = plan_quantized_modules(network, setup, is_reader, reads_again=rule.allows_disk)
        for plan in plans:
            separate_shared_names(plan)
        self._modules = {plan.name: plan.module for plan in plans}
        self._files = {plan.name: plan.files for plan in plans if plan.files is not None}
        self._gpus_of_ranks = setup.ranks.gather_on_node(self._device.index)

        def make_maps() -> list[DeviceMap]:
            budgets = budgets_of_devices(setup, self._gpus_of_ranks)
            packing = pack(plans, rule.make, budgets, rule.allows_disk)
            packing.check(setup.options.placement, "teacher.placement=auto chooses from what fits")
            return packing.maps

        # One rank of the node makes the maps: free memory may change between measurements of several ranks.
        maps = setup.ranks.all_succeed(lambda: setup.ranks.broadcast_from_local_main(make_maps))
        resident, partitions, onloaded = setup.ranks.all_succeed(lambda: self._partition(plans, maps))

        from_host = [group for group in onloaded if group.location == "cpu"]
        from_disk = [group for group in onloaded if group.location == "disk"]
        pin_memory = PinnedMemoryOptions.of(setup.options).pin_memory
        self._shared = SharedWeights.make(resident + from_host, self._files, setup.ranks, pin_memory)
        self._meta_bindings = [Binding(self._modules[group.module_name], group.bound) for group in resident]
        for i, group in enumerate(resident):
            Binding(self._modules[group.module_name], group.bound, self._shared.group_bytes(i)).bind()
        sources = [(group.stored, self._files[group.module_name]) for group in from_disk]
        self._reader = FileReader(sources, FileReadingOptions.of(setup.options).read_threads) if sources else None
        self._staging = staging_buffer([unit for unit, _ in sources], self._device)
        if self._reader is None:
            self._close_files()

        copy_in = [(group, partial(self._copy_from_host, i)) for i, group in enumerate(from_host, len(resident))]
        copy_in += [(group, partial(self._read, i)) for i, group in enumerate(from_disk)]
        copies, gpus = DeviceCopies(), [torch.device("cuda", gpu) for gpu in sorted(self._shared.gpu_bytes)]
        shares_gpus = self._device.type == "cuda" and setup.ranks.local_world_size > 1
        # On all nodes or on none: locks communicate between all ranks, and a node may have nothing on its GPUs.
        locks_gpus = shares_gpus and any(setup.ranks.gather(bool(gpus)))
        self._ticket_lock = GpuTicketLock(gpus, setup.ranks) if locks_gpus else None
        for name, module in self._modules.items():
            weights = {
                group.bound.name: OnloadedWeights(module, group.bound, copy)
                for group, copy in copy_in
                if group.module_name == name
            }
            attach_hooks(module, partitions[name], self._device_of, weights, copies, self._ticket_lock)

    @staticmethod
    @abstractmethod
    def map_rule(options: TeacherOptions) -> MapRule:
        """The rule by which maps are made. Reads no weights.

        The node's first rank applies it, to one module after the other, with the bytes that each device has left.
        """

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        """As `Teacher.predict`.

        Where several ranks share GPUs, each GPU runs their passes in a fixed order: streams wait for other ranks, the
        host does not. All ranks then call it equally often, and it communicates if the network has several modules.
        """
        return answer(self._network, requests, self._run, None if self._ticket_lock is None else self._ranks)

    def memory(self) -> TeacherMemory:
        """As `Teacher.memory`; weights on a GPU on which no rank trains count for the node's first rank."""
        own = sum(own_buffer_bytes(module) for module in self._modules.values())
        if self._device.type == "cpu":
            return TeacherMemory(host_bytes=self._shared.host_bytes + own * self._ranks.local_world_size)
        counted = [num_bytes for gpu, num_bytes in self._shared.gpu_bytes.items() if self._counts(gpu)]
        return TeacherMemory(sum(counted) + own, self._shared.host_bytes)

    def close(self) -> None:
        """As `Teacher.close`. Communicates if weights are on GPUs: the rank that owns them frees them last."""
        for module in self._modules.values():
            remove_hook_from_submodules(module)
        for binding in self._meta_bindings:
            binding.bind()
        self._meta_bindings.clear()
        self._modules.clear()
        if self._reader is not None:
            self._reader.close()
            self._reader = self._staging = None
        self._close_files()
        self._shared.close()
        if self._ticket_lock is not None:
            self._ticket_lock.close()

    def _partition(
        self, plans: Sequence[ModulePlan], maps: Sequence[DeviceMap]
    ) -> tuple[list[TensorGroup], dict[str, list[ModulePartition]], list[TensorGroup]]:
        """(Resident groups, module name -> its partitions, groups that are onloaded when their partition runs)."""
        resident: list[TensorGroup] = []
        partitions: dict[str, list[ModulePartition]] = {}
        onloaded: list[TensorGroup] = []
        for plan, device_map in zip(plans, maps, strict=True):
            resident += resident_groups(plan, device_map, self._is_resident)
            partitions[plan.name] = partition_module(plan, device_map, self._is_resident)
            onloaded += [
                onloaded_group(plan, partition)
                for partition in partitions[plan.name]
                if partition.names and not self._is_resident(partition.location)
            ]
        return resident, partitions, onloaded

    def _run(self, agenda: ModuleCalls) -> list[list[Outputs]]:
        device = self._device
        results = []
        for name, calls in agenda:
            answers = [self._pass(name, call) for call in calls]
            results.append([{key: value.to(device) for key, value in outputs.items()} for outputs in answers])
        return results

    def _pass(self, name: str, call: Call) -> Outputs:
        if self._ticket_lock is None:
            return self._network.run(self._modules[name], call)
        self._ticket_lock.begin_pass(name)
        try:
            return self._network.run(self._modules[name], call)
        finally:
            # Also after an error, since the other ranks' streams wait for this pass.
            self._ticket_lock.end_pass()

    def _copy_from_host(self, index: int) -> Tensor:
        # Nothing writes to this host memory after loading, so the host need not wait for the copy.
        return self._shared.group_bytes(index).to(self._device, non_blocking=True)

    def _read(self, index: int) -> Tensor:
        assert self._reader is not None
        num_bytes = self._reader.num_bytes(index)
        if self._staging is None:
            target = torch.empty(num_bytes, dtype=torch.uint8)
            self._reader.read(index, target)
            return target
        self._reader.read(index, self._staging)
        return self._staging[:num_bytes].to(self._device)

    def _is_resident(self, location: Location) -> bool:
        return isinstance(location, int) or (location == "cpu" and self._device.type == "cpu")

    def _device_of(self, location: Location) -> torch.device:
        if isinstance(location, int) and self._device.type == "cuda":
            return torch.device("cuda", location)
        return self._device

    def _counts(self, gpu: int) -> bool:
        """Whether this rank reports a GPU's memory: the first rank that trains on it does, or the node's first rank."""
        first = self._gpus_of_ranks.index(gpu) if gpu in self._gpus_of_ranks else 0
        return first == self._ranks.local_rank

    def _close_files(self) -> None:
        for files in self._files.values():
            files.close()
        self._files.clear()


def pack(plans: Sequence[ModulePlan], make_map: MakeMap, budgets: Mapping[int, int], allows_disk: bool) -> Packing:
    """The maps of all modules, made one after the other, since the modules share the devices' memory.

    Args:
        budgets: bytes that each device number has for all modules.
        allows_disk: whether the maps may hold `disk`; otherwise `disk` marks what fits on no device.
    """
    left, unplaced = dict(budgets), 0
    maps: list[DeviceMap] = []
    for plan in plans:
        entries = [entry for unit in plan.units for entry in unit.entries]
        # Accelerate counts the bytes of tensors, but not the padding that aligns them.
        padding = sum(unit.num_bytes for unit in plan.units) - sum(entry.num_bytes for entry in entries)
        blocks = [unit.name for unit in plan.units if unit.name != REST]
        device_map = make_map(plan.module, blocks, {device: free - padding for device, free in left.items()})
        maps.append(device_map)
        for group in resident_groups(plan, device_map, lambda _: True):
            if isinstance(group.location, int):
                left[group.location] -= group.stored.num_bytes
            elif group.location == "disk" and not allows_disk:
                unplaced += group.stored.num_bytes
    return Packing(maps, {device: budgets[device] - left[device] for device in budgets}, unplaced, budgets)
