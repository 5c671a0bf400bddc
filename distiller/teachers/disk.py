"""`teacher.placement: disk`: blocks are read from safetensors files when needed, for teachers larger than memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from distiller.config.placements.disk import DiskOptions
from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher, TeacherMemory, answer
from distiller.teachers.quantization.modules import plan_quantized_modules
from distiller.teachers.streamed import choose_resident
from distiller.teachers.streaming.block_offload import OffloadedBlock, OffloadedModules, allocate_buffers
from distiller.teachers.streaming.copiers import FileCopier, FileReader, ThreadCopier
from distiller.teachers.weights.host_copy import HostCopy
from distiller.teachers.weights.layout import REST, own_buffer_bytes
from distiller.teachers.weights.loading import load_on_all_ranks

NUM_STAGING = 2
"""Staging buffers on the host: threads fill one while the GPU copies from the other."""


@final
class DiskTeacher(Teacher):
    """Threads read the next blocks into two staging buffers on the host, from which the GPU copies them.

    Host memory holds nothing else of the teacher, except what the operating system keeps in its page cache. Without a
    GPU the threads read into the pool's buffers. Communicates only while loading.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        self._network, self._ranks, options = network, setup.ranks, DiskOptions.of(setup.options)
        device = setup.ranks.device
        self._plans = plan_quantized_modules(network, setup, is_reader=True, reads_again=True)
        resident = choose_resident(self._plans, setup)
        blocks, sources, self._staging, self._resident_bytes = [], [], None, 0
        for plan in self._plans:
            for unit in plan.units:
                if unit.name != REST and (plan.name, unit.name) not in resident:
                    assert plan.files is not None
                    blocks.append(OffloadedBlock(plan.name, plan.module, unit))
                    sources.append((unit, plan.files))
        max_block_bytes = max((unit.num_bytes for unit, _ in sources), default=0)
        if device.type == "cuda":
            # Before weights are read, so that a driver that refuses to page-lock memory does it early.
            self._staging = setup.ranks.all_succeed(lambda: _staging(max_block_bytes, setup))
        for plan in self._plans:
            kept = [unit for unit in plan.units if unit.name == REST or (plan.name, unit.name) in resident]
            self._resident_bytes += load_on_all_ranks(plan, kept, setup.ranks) + own_buffer_bytes(plan.module)
        buffers = allocate_buffers(max_block_bytes, min(options.ring_blocks, len(blocks)), device)
        self._buffer_bytes = sum(buffer.data.nbytes for buffer in buffers)
        reader = FileReader(sources, options.read_threads)
        if self._staging is not None:
            copier = FileCopier(reader, [self._staging.piece(index) for index in range(NUM_STAGING)], device)
        else:
            copier = ThreadCopier(reader.read, reader.close)
        modules = {plan.name: plan.module for plan in self._plans}
        self._offloaded_modules = OffloadedModules(network, modules, blocks, buffers, copier, device, options.amortise)

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        return answer(self._network, requests, self._offloaded_modules.run)

    def memory(self) -> TeacherMemory:
        own_bytes, num_ranks = self._resident_bytes + self._buffer_bytes, self._ranks.local_world_size
        if self._ranks.device.type == "cpu":
            return TeacherMemory(host_bytes=own_bytes * num_ranks)
        staging_bytes = 0 if self._staging is None else self._staging.num_bytes
        return TeacherMemory(own_bytes, staging_bytes * num_ranks)

    def close(self) -> None:
        self._offloaded_modules.close()
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        for plan in self._plans:
            plan.close_files()
        self._plans.clear()


def _staging(size: int, setup: Setup) -> HostCopy:
    """`NUM_STAGING` host buffers of `size` bytes for this rank alone, page-locked unless `teacher.pin_memory` is false.

    Not torch's page-locked memory, which is rounded up to a power of two: two buffers of 0.65 GiB would take 2 GiB.
    Raises UserError when there is too little host memory, or the driver refuses to page-lock it.
    """
    staging = HostCopy.make([size] * NUM_STAGING, setup.ranks.as_single_process())
    if DiskOptions.of(setup.options).pin_memory:
        staging.page_lock()
    return staging
