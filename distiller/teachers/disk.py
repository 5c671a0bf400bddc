"""`teacher.placement: disk`: the ring of `streamed`, fed from safetensors files; for teachers larger than memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher, TeacherMemory, answer
from distiller.teachers.feeds import FileFeed, FileReader, ThreadFeed
from distiller.teachers.filling import load_everywhere, plan_modules
from distiller.teachers.layout import REST, own_buffer_bytes
from distiller.teachers.passing import PassingModules, PassingUnit, make_slots
from distiller.teachers.streamed import choose_resident

NUM_STAGING = 2


class DiskTeacher(Teacher):
    """Threads read ahead into two page-locked buffers of a block; the host keeps nothing else but its page cache."""

    def __init__(self, network: Network, setup: Setup) -> None:
        self._network, self._ranks, options = network, setup.ranks, setup.options
        device = setup.ranks.device
        self._plans = plan_modules(network, setup, is_reader=True)
        resident = choose_resident(self._plans, setup)
        units, sources, self._resident_bytes = [], [], 0
        for plan in self._plans:
            stays = [unit for unit in plan.units if unit.name == REST or (plan.name, unit.name) in resident]
            self._resident_bytes += load_everywhere(plan, stays, setup.ranks) + own_buffer_bytes(plan.module)
            for unit in plan.units:
                if unit not in stays:
                    assert plan.files is not None
                    units.append(PassingUnit(plan.name, plan.module, unit))
                    sources.append((unit, plan.files))
        size = max((unit.num_bytes for unit, _ in sources), default=0)
        slots = make_slots(size, min(options.ring_blocks, len(units)), device)
        self._slot_bytes, self._staging_bytes = sum(slot.buffer.nbytes for slot in slots), 0
        reader = FileReader(sources, options.read_threads)
        if device.type == "cuda":
            staging = [torch.empty(size, dtype=torch.uint8, pin_memory=options.pin_memory) for _ in range(NUM_STAGING)]
            self._staging_bytes = NUM_STAGING * size
            feed = FileFeed(reader, staging, device)
        else:
            feed = ThreadFeed(reader.fill, reader.close)
        modules = {plan.name: plan.module for plan in self._plans}
        self._passing = PassingModules(network, modules, units, slots, feed, device, options.amortise)

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        return answer(self._network, requests, self._passing.run)

    def memory(self) -> TeacherMemory:
        own, count = self._resident_bytes + self._slot_bytes, self._ranks.local_world_size
        if self._ranks.device.type == "cpu":
            return TeacherMemory(host_bytes=own * count)
        return TeacherMemory(own, self._staging_bytes * count)

    def close(self) -> None:
        self._passing.close()
        for plan in self._plans:
            plan.close_files()
        self._plans.clear()
