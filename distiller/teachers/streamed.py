"""`teacher.placement: streamed`: one host copy a node; blocks pass through a few buffers on each GPU, copied ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from distiller.config.placements.shared_options import BlockBufferOptions
from distiller.config.placements.streamed import StreamedOptions
from distiller.distributed.free_memory import free_gpu_bytes
from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher, TeacherMemory, answer
from distiller.teachers.footprint import AUTO_SHARE
from distiller.teachers.streaming.block_offload import OffloadedBlock, OffloadedModules, allocate_buffers
from distiller.teachers.streaming.buffer_pool import BlockBuffer, Copier
from distiller.teachers.streaming.copiers import GatherCopier, HostCopier, ThreadCopier
from distiller.teachers.streaming.peer_copier import PeerCopier, has_peer_access
from distiller.teachers.weights.host_copy import HostCopy
from distiller.teachers.weights.layout import ALIGNMENT, REST, own_buffer_bytes
from distiller.teachers.weights.loading import ModulePlan, load_on_all_ranks, load_units, plan_modules


@final
class StreamedTeacher(Teacher):
    """Host to device only: the weights are frozen, so nothing is copied back.

    The rest of each module (embeddings, head) and `teacher.resident_blocks` stay on the GPU. The node's ranks share
    one page-locked copy of the other blocks; with `teacher.shard_transfers` each copies its share of a block and they
    gather it, and then `predict` communicates.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        self._network, self._ranks, options = network, setup.ranks, StreamedOptions.of(setup.options)
        device, count = setup.ranks.device, setup.ranks.local_world_size
        self._is_sharing = shares_transfers(setup)
        plans = plan_modules(network, setup, is_reader=setup.ranks.is_local_main)
        resident = choose_resident(plans, setup)
        kept = {
            plan.name: [unit for unit in plan.units if unit.name == REST or (plan.name, unit.name) in resident]
            for plan in plans
        }
        passing = [(plan, unit) for plan in plans for unit in plan.units if unit not in kept[plan.name]]
        units = [OffloadedBlock(plan.name, plan.module, unit) for plan, unit in passing]

        # All that can be refused for lack of memory or of a right comes before weights are read.
        step = ALIGNMENT * (count if self._is_sharing else 1)
        sizes = [-(-unit.num_bytes // step) * step for _, unit in passing]
        self._host = setup.ranks.all_succeed(lambda: HostCopy.make(sizes, setup.ranks))
        if device.type == "cuda" and options.pin_memory:
            setup.ranks.all_succeed(self._host.page_lock)
        slots = allocate_buffers(max(sizes, default=0), min(options.ring_blocks, len(units)), device)
        self._slot_bytes = sum(slot.data.nbytes for slot in slots)
        feed = self._feed(slots)

        self._resident_bytes = 0
        for plan in plans:
            self._resident_bytes += load_on_all_ranks(plan, kept[plan.name], setup.ranks) + own_buffer_bytes(
                plan.module
            )
        sources = [(unit, plan.files) for plan, unit in passing if plan.files is not None]
        pieces = [self._host.piece(index) for index in range(len(sources))]
        setup.ranks.all_succeed(lambda: load_units(sources, pieces))
        for plan in plans:
            plan.close_files()
        modules = {plan.name: plan.module for plan in plans}
        self._passing = OffloadedModules(network, modules, units, slots, feed, device, options.amortise)

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        return answer(self._network, requests, self._passing.run, self._ranks if self._is_sharing else None)

    def memory(self) -> TeacherMemory:
        own = self._resident_bytes + self._slot_bytes
        if self._ranks.device.type == "cpu":
            return TeacherMemory(host_bytes=own * self._ranks.local_world_size + self._host.num_bytes)
        return TeacherMemory(own, self._host.num_bytes)

    def close(self) -> None:
        self._passing.close()
        self._host.close()

    def _feed(self, slots: Sequence[BlockBuffer]) -> Copier:
        ranks, pieces = self._ranks, self._host.piece
        on_gpu = ranks.device.type == "cuda"
        if self._is_sharing and slots:
            if on_gpu and has_peer_access(ranks):
                return PeerCopier(pieces, slots, ranks)
            return GatherCopier(pieces, ranks.device, ranks.new_node_group())
        if on_gpu:
            return HostCopier(pieces, ranks.device)
        return ThreadCopier(lambda unit, buffer: buffer[: pieces(unit).numel()].copy_(pieces(unit)))


def shares_transfers(setup: Setup) -> bool:
    """Whether each of the node's ranks copies a share of every block: not when there is but one."""
    wanted = StreamedOptions.of(setup.options).shard_transfers
    is_wanted = setup.ranks.device.type == "cuda" if wanted == "auto" else wanted
    return is_wanted and setup.ranks.local_world_size > 1


def choose_resident(plans: Sequence[ModulePlan], setup: Setup) -> set[tuple[str, str]]:
    """(module, block) of those that stay on the device, spread evenly so that copying never pauses. Communicates."""
    blocks = [(plan.name, unit.name) for plan in plans for unit in plan.units if unit.name != REST]
    count = BlockBufferOptions.of(setup.options).resident_blocks
    if count == "auto":
        count = min(setup.ranks.gather(_blocks_that_fit(plans, setup)))
    count = min(count, len(blocks))
    return {blocks[index * len(blocks) // count] for index in range(count)}


def _blocks_that_fit(plans: Sequence[ModulePlan], setup: Setup) -> int:
    """How many blocks a GPU can keep beside the student and the buffers, from four fifths of what it has free.

    The last fifth is for activations.
    """
    device, options = setup.ranks.device, BlockBufferOptions.of(setup.options)
    if device.type != "cuda":
        return 0
    sizes = [unit.num_bytes for plan in plans for unit in plan.units if unit.name != REST]
    rest = sum(unit.num_bytes for plan in plans for unit in plan.units if unit.name == REST)
    free = int(free_gpu_bytes(device) * AUTO_SHARE)
    budget = free - setup.reserved_bytes - rest - options.ring_blocks * max(sizes)
    return max(budget // max(sizes), 0)
