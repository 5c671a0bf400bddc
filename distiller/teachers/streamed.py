"""`teacher.placement: streamed`: one host copy for each node; blocks are copied ahead into buffers on each GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from distiller.config.placements.shared_options import BlockBufferOptions
from distiller.config.placements.streamed import StreamedOptions
from distiller.distributed.free_memory import free_gpu_bytes
from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher, TeacherMemory, answer
from distiller.teachers.footprint import AUTO_SHARE, kept_for_updates
from distiller.teachers.quantization.modules import plan_quantized_modules
from distiller.teachers.streaming.block_offload import OffloadedBlock, OffloadedModules, allocate_buffers
from distiller.teachers.streaming.buffer_pool import BlockBuffer, Copier
from distiller.teachers.streaming.copiers import GatherCopier, HostCopier, ThreadCopier
from distiller.teachers.streaming.peer_copier import PeerCopier, has_peer_access
from distiller.teachers.weights.host_copy import HostCopy
from distiller.teachers.weights.layout import ALIGNMENT, REST, own_buffer_bytes
from distiller.teachers.weights.loading import ModulePlan, load_on_all_ranks, load_units


@final
class StreamedTeacher(Teacher):
    """Copies go from host to device only: the weights are frozen, so nothing is copied back.

    What is outside of blocks (embeddings, head) and `teacher.resident_blocks` stay on the GPU. The node's ranks share
    one page-locked copy of the other blocks. With `teacher.shard_transfers` each rank copies its share of a block to
    its GPU, and the GPUs exchange the shares; `predict` then communicates.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        self._network, self._ranks, options = network, setup.ranks, StreamedOptions.of(setup.options)
        device, num_ranks = setup.ranks.device, setup.ranks.local_world_size
        self._is_sharing = shares_transfers(setup)
        plans = plan_quantized_modules(network, setup, is_reader=setup.ranks.is_local_main)
        resident = choose_resident(plans, setup)
        kept = {
            plan.name: [unit for unit in plan.units if unit.name == REST or (plan.name, unit.name) in resident]
            for plan in plans
        }
        offloaded = [(plan, unit) for plan in plans for unit in plan.units if unit not in kept[plan.name]]
        blocks = [OffloadedBlock(plan.name, plan.module, unit) for plan, unit in offloaded]

        # Whatever can fail for lack of memory or of a permission comes before weights are read.
        alignment = ALIGNMENT * (num_ranks if self._is_sharing else 1)
        sizes = [-(-unit.num_bytes // alignment) * alignment for _, unit in offloaded]
        self._host = HostCopy.make(sizes, setup.ranks)
        if device.type == "cuda" and options.pin_memory:
            setup.ranks.all_succeed(self._host.page_lock)
        buffers = allocate_buffers(max(sizes, default=0), min(options.ring_blocks, len(blocks)), device)
        self._buffer_bytes = sum(buffer.data.nbytes for buffer in buffers)
        copier = self._make_copier(buffers)

        self._resident_bytes = 0
        for plan in plans:
            self._resident_bytes += load_on_all_ranks(plan, kept[plan.name], setup.ranks) + own_buffer_bytes(
                plan.module
            )
        sources = [(unit, plan.files) for plan, unit in offloaded if plan.files is not None]
        pieces = [self._host.piece(index) for index in range(len(sources))]
        setup.ranks.all_succeed(lambda: load_units(sources, pieces))
        for plan in plans:
            plan.close_files()
        modules = {plan.name: plan.module for plan in plans}
        self._offloaded_modules = OffloadedModules(network, modules, blocks, buffers, copier, device, options.amortise)

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        return answer(self._network, requests, self._offloaded_modules.run, self._ranks if self._is_sharing else None)

    def memory(self) -> TeacherMemory:
        own_bytes = self._resident_bytes + self._buffer_bytes
        if self._ranks.device.type == "cpu":
            return TeacherMemory(host_bytes=own_bytes * self._ranks.local_world_size + self._host.num_bytes)
        return TeacherMemory(own_bytes, self._host.num_bytes)

    def close(self) -> None:
        self._offloaded_modules.close()
        self._host.close()

    def _make_copier(self, buffers: Sequence[BlockBuffer]) -> Copier:
        """The copier that fills these buffers. Communicates where the ranks share transfers."""
        ranks, pieces = self._ranks, self._host.piece
        on_gpu = ranks.device.type == "cuda"
        if self._is_sharing and buffers:
            if on_gpu and has_peer_access(ranks):
                return PeerCopier(pieces, buffers, ranks)
            return GatherCopier(pieces, ranks.device, ranks.new_node_group())
        if on_gpu:
            return HostCopier(pieces, ranks.device)
        return ThreadCopier(lambda unit, buffer: buffer[: pieces(unit).numel()].copy_(pieces(unit)))


def shares_transfers(setup: Setup) -> bool:
    """Whether each of the node's ranks copies only a share of every block; False with one rank on the node."""
    wanted = StreamedOptions.of(setup.options).shard_transfers
    is_wanted = setup.ranks.device.type == "cuda" if wanted == "auto" else wanted
    return is_wanted and setup.ranks.local_world_size > 1


def choose_resident(plans: Sequence[ModulePlan], setup: Setup) -> set[tuple[str, str]]:
    """(module, block) names of the blocks that stay on the device, evenly spaced so that copying never pauses.

    Communicates where `teacher.resident_blocks` is `auto`.
    """
    blocks = [(plan.name, unit.name) for plan in plans for unit in plan.units if unit.name != REST]
    count = BlockBufferOptions.of(setup.options).resident_blocks
    if count == "auto":
        count = min(setup.ranks.gather(_blocks_that_fit(plans, setup)))
    count = min(count, len(blocks))
    return {blocks[index * len(blocks) // count] for index in range(count)}


def _blocks_that_fit(plans: Sequence[ModulePlan], setup: Setup) -> int:
    """Number of blocks that fit in the GPU's free memory beside student, updates and the pool's buffers.

    See `kept_for_updates`. 0 on the CPU, and for a teacher without blocks.
    """
    device, options = setup.ranks.device, BlockBufferOptions.of(setup.options)
    if device.type != "cuda":
        return 0
    sizes = [unit.num_bytes for plan in plans for unit in plan.units if unit.name != REST]
    if not sizes:
        return 0
    rest = sum(unit.num_bytes for plan in plans for unit in plan.units if unit.name == REST)
    free = free_gpu_bytes(device)
    # The larger of both: a prediction that is too low would leave no room at all.
    kept = max(kept_for_updates(setup, free, AUTO_SHARE), int(free * (1 - AUTO_SHARE)))
    budget = free - kept - setup.reserved_bytes - rest - options.ring_blocks * max(sizes)
    return max(budget // max(sizes), 0)
