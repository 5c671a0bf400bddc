"""One copy of the teacher for each node, spread over its GPUs by a device map: what three placements have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from accelerate.hooks import remove_hook_from_submodules
from torch import Tensor, nn

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
from distiller.teachers.streaming.copiers import FileReader
from distiller.teachers.weights.layout import REST, Binding, own_buffer_bytes
from distiller.teachers.weights.loading import Plan, staging_buffer
from distiller.teachers.weights.quantized import plan_held
from distiller.teachers.weights.shared_parts import SharedParts

MakeMap = Callable[[nn.Module, Sequence[str], Mapping[int, int]], DeviceMap]
"""(module without weights, its blocks, bytes that each device has for it) -> where its parts go."""


class DeviceMapTeacher(Teacher):
    """Weights that the node's ranks share, and hooks that take each rank's own forward pass through them.

    Abstract: a placement hands it the map.

    On GPUs: numbered parts lie in the GPUs' memory, which the node's first rank owns and the others map; `cpu` parts in
    host memory that all ranks map, from where each copies a block to its own GPU when it runs; `disk` parts are read
    from the files when they run. Without GPUs the numbers stand for ranks, and all but `disk` lies in that host memory.
    """

    def __init__(self, network: Network, setup: Setup, make_map: MakeMap, reads_in_use: bool = False) -> None:
        """Communicates. Raises UserError before any weight is read.

        Args:
            make_map: called on the node's first rank for one module after the other, with what is left of each device.
            reads_in_use: whether the map may hold `disk`; otherwise that is what found no room.
        """
        self._network, self._ranks, self._device = network, setup.ranks, _numbered(setup.ranks.device)
        plans = plan_held(network, setup, is_reader=setup.ranks.is_local_main or reads_in_use)
        for plan in plans:
            separate_shared_names(plan)
        self._modules = {plan.name: plan.module for plan in plans}
        self._files = {plan.name: plan.files for plan in plans if plan.files is not None}
        self._gpus_of_ranks = setup.ranks.gather_on_node(self._device.index)

        def make_maps() -> list[DeviceMap]:
            room = budgets_of_devices(setup.ranks, setup.reserved_bytes, self._gpus_of_ranks)
            packing = pack(plans, make_map, room, reads_in_use)
            packing.check(setup.options.placement, "teacher.placement=auto chooses from what fits")
            return packing.maps

        # One rank of the node decides: free memory changes while the ranks look.
        maps = setup.ranks.all_succeed(lambda: setup.ranks.broadcast_from_local_main(make_maps))
        lying, places, passing = setup.ranks.all_succeed(lambda: self._apply(plans, maps))

        from_host = [part for part in passing if part.location == "cpu"]
        from_disk = [part for part in passing if part.location == "disk"]
        self._shared = SharedParts.make(lying + from_host, self._files, setup.ranks, setup.options.pin_memory)
        self._away = [Binding(self._modules[part.module_name], part.bound) for part in lying]
        for number, part in enumerate(lying):
            Binding(self._modules[part.module_name], part.bound, self._shared.piece(number)).bind()
        sources = [(part.stored, self._files[part.module_name]) for part in from_disk]
        self._reader = FileReader(sources, setup.options.read_threads) if sources else None
        self._staging = staging_buffer([unit for unit, _ in sources], self._device)
        if self._reader is None:
            self._close_files()

        bring = [(part, partial(self._copy_from_host, number)) for number, part in enumerate(from_host, len(lying))]
        bring += [(part, partial(self._read, number)) for number, part in enumerate(from_disk)]
        carrier, gpus = DeviceCopies(), [torch.device("cuda", gpu) for gpu in sorted(self._shared.gpu_bytes)]
        takes_turns = self._device.type == "cuda" and setup.ranks.local_world_size > 1 and bool(gpus)
        self._turns = GpuTicketLock(gpus, setup.ranks) if takes_turns else None
        for name, module in self._modules.items():
            weights = {
                part.bound.name: OnloadedWeights(module, part.bound, get)
                for part, get in bring
                if part.module_name == name
            }
            attach_hooks(module, places[name], self._device_of, weights, carrier, self._turns)

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        """As `Teacher.predict`. The ranks take turns on the GPUs, which their streams arrange without the host."""
        return answer(self._network, requests, self._run, None if self._turns is None else self._ranks)

    def memory(self) -> TeacherMemory:
        """As `Teacher.memory`; a GPU on which no rank trains counts for the node's first rank."""
        own = sum(own_buffer_bytes(module) for module in self._modules.values())
        if self._device.type == "cpu":
            return TeacherMemory(host_bytes=self._shared.host_bytes + own * self._ranks.local_world_size)
        counted = [num_bytes for gpu, num_bytes in self._shared.gpu_bytes.items() if self._counts(gpu)]
        return TeacherMemory(sum(counted) + own, self._shared.host_bytes)

    def close(self) -> None:
        """As `Teacher.close`. Communicates where the copy is on GPUs: its owner frees it last."""
        for module in self._modules.values():
            remove_hook_from_submodules(module)
        for away in self._away:
            away.bind()
        self._away.clear()
        self._modules.clear()
        if self._reader is not None:
            self._reader.close()
            self._reader = self._staging = None
        self._close_files()
        self._shared.close()
        if self._turns is not None:
            self._turns.close()

    def _apply(
        self, plans: Sequence[Plan], maps: Sequence[DeviceMap]
    ) -> tuple[list[TensorGroup], dict[str, list[ModulePartition]], list[TensorGroup]]:
        """What stays where it lies, every module's places, and what comes in when a place runs."""
        lying, places, passing = [], {}, []
        for plan, device_map in zip(plans, maps, strict=True):
            lying += resident_groups(plan, device_map, self._is_resident)
            places[plan.name] = partition_module(plan, device_map, self._is_resident)
            passing += [
                onloaded_group(plan, place)
                for place in places[plan.name]
                if place.names and not self._is_resident(place.location)
            ]
        return lying, places, passing

    def _run(self, agenda: ModuleCalls) -> list[list[Outputs]]:
        device = self._device
        results = []
        for name, calls in agenda:
            answers = [self._pass(name, call) for call in calls]
            results.append([{key: value.to(device) for key, value in outputs.items()} for outputs in answers])
        return results

    def _pass(self, name: str, call: Call) -> Outputs:
        if self._turns is None:
            return self._network.run(self._modules[name], call)
        self._turns.begin(name)
        try:
            return self._network.run(self._modules[name], call)
        finally:
            # Also after an error: the other ranks' streams wait for this pass.
            self._turns.end()

    def _copy_from_host(self, number: int) -> Tensor:
        # Nobody writes to host memory any more, so the copy need not be over when the host goes on.
        return self._shared.piece(number).to(self._device, non_blocking=True)

    def _read(self, number: int) -> Tensor:
        assert self._reader is not None
        num_bytes = self._reader.num_bytes(number)
        if self._staging is None:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            self._reader.fill(number, buffer)
            return buffer
        self._reader.fill(number, self._staging)
        return self._staging[:num_bytes].to(self._device)

    def _is_resident(self, location: Location) -> bool:
        return isinstance(location, int) or (location == "cpu" and self._device.type == "cpu")

    def _device_of(self, location: Location) -> torch.device:
        on_gpu = isinstance(location, int) and self._device.type == "cuda"
        return torch.device("cuda", location) if on_gpu else self._device

    def _counts(self, gpu: int) -> bool:
        """Whether this rank reports a GPU: the first rank that trains on it does, else the node's first."""
        first = self._gpus_of_ranks.index(gpu) if gpu in self._gpus_of_ranks else 0
        return first == self._ranks.local_rank

    def _close_files(self) -> None:
        for files in self._files.values():
            files.close()
        self._files.clear()


def pack(plans: Sequence[Plan], make_map: MakeMap, room: Mapping[int, int], reads_in_use: bool) -> Packing:
    """Every module's map; one after the other, since they share the devices' memory.

    Args:
        room: bytes that each device number has for all modules.
        reads_in_use: whether the maps may hold `disk`; otherwise that is what found no room.
    """
    left, maps, unplaced = dict(room), [], 0
    for plan in plans:
        entries = [entry for unit in plan.units for entry in unit.entries]
        # Accelerate counts tensors, not the gaps between them that align each.
        gaps = sum(unit.num_bytes for unit in plan.units) - sum(entry.num_bytes for entry in entries)
        blocks = [unit.name for unit in plan.units if unit.name != REST]
        device_map = make_map(plan.module, blocks, {number: free - gaps for number, free in left.items()})
        maps.append(device_map)
        for part in resident_groups(plan, device_map, lambda _: True):
            if isinstance(part.location, int):
                left[part.location] -= part.stored.num_bytes
            elif part.location == "disk" and not reads_in_use:
                unplaced += part.stored.num_bytes
    return Packing(maps, {number: room[number] - left[number] for number in room}, unplaced, room)


def _numbered(device: torch.device) -> torch.device:
    """The device by its number: a single process may call its GPU just `cuda`."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
