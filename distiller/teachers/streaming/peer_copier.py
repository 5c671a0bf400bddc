"""Each rank copies its share of a block from host memory to its GPU and passes it on to the other GPUs' slots.

Only copy engines work: an all-gather by kernels takes multiprocessors from the teacher's own products, which cost 9% of
a step of 6,240 tokens on two H200.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from distiller.distributed.ranks import Ranks
from distiller.errors import RunError, UserError
from distiller.teachers.cuda import driver
from distiller.teachers.cuda.stream_counters import StreamCounters
from distiller.teachers.streaming.buffer_pool import BlockBuffer, Copier
from distiller.teachers.streaming.copiers import Pieces
from distiller.teachers.weights.gpu_copy import check_same_gpus


class PeerCopier(Copier):
    """Communicates by memory alone, in stream order: every rank of the node starts the same units in the same slots.

    Counters, by (rank, slot): how often a slot of that rank was free to be filled, and how many shares from each other
    rank have arrived in it. A round is one filling of one slot; all ranks count alike.
    """

    def __init__(self, pieces: Pieces, slots: Sequence[BlockBuffer], ranks: Ranks) -> None:
        """Maps the slots of the node's other GPUs. Communicates. Raises UserError where that is not possible."""
        self._pieces, self._ranks, self._device = pieces, ranks, ranks.device
        self._me, self._count = ranks.local_rank, ranks.local_world_size
        self._numbers = {id(slot): number for number, slot in enumerate(slots)}
        self._rounds = [0] * len(slots)
        self._copying, self._passing = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._copied = [torch.cuda.Event() for _ in slots]
        self._passed = [torch.cuda.Event() for _ in slots]
        self._signals = StreamCounters(self._count * len(slots) * (1 + self._count), ranks)
        self._mapped: dict[bytes, int] = {}
        check_same_gpus(ranks)
        with torch.cuda.device(self._device):
            self._theirs = self._map_slots(slots)

    def start(self, slot: BlockBuffer) -> None:
        number, piece = self._numbers[id(slot)], self._pieces(slot.unit)
        share = piece.numel() // self._count
        own = slice(self._me * share, (self._me + 1) * share)
        assert slot.used is not None
        with torch.cuda.stream(self._copying):
            self._copying.wait_event(slot.used)
            # What was brought and never used may still be arriving, or on its way from here to others.
            self._copying.wait_event(self._passed[number])
            self._wait_for_shares(number, self._copying)
            self._rounds[number] += 1
            self._signals.write(self._free(self._me, number), self._rounds[number], self._copying)
            slot.buffer[own].copy_(piece[own], non_blocking=True)
            self._copied[number].record(self._copying)
        with torch.cuda.stream(self._passing):
            self._passing.wait_event(self._copied[number])
            for offset in range(1, self._count):
                # Not all to the same GPU at once.
                peer = (self._me + offset) % self._count
                self._signals.wait(self._free(peer, number), self._rounds[number], self._passing)
                target, source = self._theirs[peer][number] + own.start, self._theirs[self._me][number] + own.start
                driver.copy(target, source, share, self._passing)
                self._signals.write(self._arrived(peer, number, self._me), self._rounds[number], self._passing)
            self._passed[number].record(self._passing)

    def wait(self, slot: BlockBuffer) -> None:
        number, stream = self._numbers[id(slot)], torch.cuda.current_stream(self._device)
        stream.wait_event(self._copied[number])
        self._wait_for_shares(number, stream)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        # Others still write into slots of this rank until they have come here too.
        self._ranks.node_barrier()
        for address in set(self._mapped.values()):
            driver.unmap_memory(address)
        self._mapped.clear()
        self._signals.close()
        self._ranks.node_barrier()

    def _wait_for_shares(self, number: int, stream: torch.cuda.Stream) -> None:
        for peer in range(self._count):
            if peer != self._me:
                self._signals.wait(self._arrived(self._me, number, peer), self._rounds[number], stream)

    def _free(self, rank: int, slot: int) -> int:
        return (rank * len(self._rounds) + slot) * (1 + self._count)

    def _arrived(self, rank: int, slot: int, sender: int) -> int:
        return self._free(rank, slot) + 1 + sender

    def _map_slots(self, slots: Sequence[BlockBuffer]) -> list[list[int]]:
        """Addresses of the slots of every rank of the node; of this one, its own."""
        addresses: list[list[int]] = []

        def export_all() -> list[tuple[bytes, int]]:
            return [driver.export_memory(slot.buffer.data_ptr()) for slot in slots]

        def map_all() -> None:
            for peer, of_peer in enumerate(handles):
                if peer == self._me:
                    addresses.append([slot.buffer.data_ptr() for slot in slots])
                    continue
                for handle, _ in of_peer:
                    # Slots may lie in one allocation, which is mapped once.
                    if handle not in self._mapped:
                        self._mapped[handle] = driver.map_memory(handle)
                addresses.append([self._mapped[handle] + offset for handle, offset in of_peer])

        try:
            handles = self._ranks.gather_on_node(self._ranks.all_succeed(export_all))
            self._ranks.all_succeed(map_all)
        except RunError as error:
            raise UserError(
                f"a process cannot map GPU memory of another one here ({error}); share the containers' IPC and process "
                "namespaces, unset expandable_segments, or set teacher.shard_transfers=false"
            ) from error
        return addresses


def has_peer_access(ranks: Ranks) -> bool:
    """Whether every GPU of the node's ranks can write to every other one. Communicates.

    NCCL_P2P_DISABLE=1 is how people say that theirs only pretend to.
    """
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return False
    gpus = ranks.gather_on_node(ranks.device.index)
    own = all(torch.cuda.can_device_access_peer(ranks.device, gpu) for gpu in gpus if gpu != ranks.device.index)
    return all(ranks.gather_on_node(own))
