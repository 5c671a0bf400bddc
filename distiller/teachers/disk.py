"""`teacher.placement: disk`: the ring of `streamed`, fed from safetensors files; for teachers larger than memory."""

from __future__ import annotations

from collections.abc import Sequence

from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher, TeacherMemory, answer
from distiller.teachers.streamed import choose_resident
from distiller.teachers.streaming.block_offload import OffloadedBlock, OffloadedModules, allocate_buffers
from distiller.teachers.streaming.copiers import FileCopier, FileReader, ThreadCopier
from distiller.teachers.weights.host_copy import HostCopy
from distiller.teachers.weights.layout import REST, own_buffer_bytes
from distiller.teachers.weights.loading import load_on_all_ranks, plan_modules

NUM_STAGING = 2


class DiskTeacher(Teacher):
    """Threads read ahead into two page-locked buffers of a block; the host keeps nothing else but its page cache."""

    def __init__(self, network: Network, setup: Setup) -> None:
        self._network, self._ranks, options = network, setup.ranks, setup.options
        device = setup.ranks.device
        self._plans = plan_modules(network, setup, is_reader=True)
        resident = choose_resident(self._plans, setup)
        units, sources, self._staging, self._resident_bytes = [], [], None, 0
        for plan in self._plans:
            for unit in plan.units:
                if unit.name != REST and (plan.name, unit.name) not in resident:
                    assert plan.files is not None
                    units.append(OffloadedBlock(plan.name, plan.module, unit))
                    sources.append((unit, plan.files))
        size = max((unit.num_bytes for unit, _ in sources), default=0)
        if device.type == "cuda":
            # Before weights are read: a driver that refuses should do so early.
            self._staging = setup.ranks.all_succeed(lambda: _staging(size, setup))
        for plan in self._plans:
            stays = [unit for unit in plan.units if unit.name == REST or (plan.name, unit.name) in resident]
            self._resident_bytes += load_on_all_ranks(plan, stays, setup.ranks) + own_buffer_bytes(plan.module)
        slots = allocate_buffers(size, min(options.ring_blocks, len(units)), device)
        self._slot_bytes = sum(slot.data.nbytes for slot in slots)
        reader = FileReader(sources, options.read_threads)
        if self._staging is not None:
            feed = FileCopier(reader, [self._staging.piece(number) for number in range(NUM_STAGING)], device)
        else:
            feed = ThreadCopier(reader.read, reader.close)
        modules = {plan.name: plan.module for plan in self._plans}
        self._passing = OffloadedModules(network, modules, units, slots, feed, device, options.amortise)

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        return answer(self._network, requests, self._passing.run)

    def memory(self) -> TeacherMemory:
        own, count = self._resident_bytes + self._slot_bytes, self._ranks.local_world_size
        if self._ranks.device.type == "cpu":
            return TeacherMemory(host_bytes=own * count)
        staging_bytes = 0 if self._staging is None else self._staging.num_bytes
        return TeacherMemory(own, staging_bytes * count)

    def close(self) -> None:
        self._passing.close()
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        for plan in self._plans:
            plan.close_files()
        self._plans.clear()


def _staging(size: int, setup: Setup) -> HostCopy:
    """This rank's own buffers, page-locked if the recipe lets it. Raises UserError where that is not possible.

    Memory that torch page-locks itself is as long as the next power of two: two of 0.65 GiB would take 2 GiB.
    """
    staging = HostCopy.make([size] * NUM_STAGING, setup.ranks.as_single_process())
    if setup.options.pin_memory:
        staging.page_lock()
    return staging
