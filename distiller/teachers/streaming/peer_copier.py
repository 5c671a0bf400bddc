"""Each rank copies its share of a block from host memory to its GPU, and from there into the other GPUs' buffers.

Copy engines do all of this. An all-gather runs kernels, which take multiprocessors from the teacher's matrix products;
that cost 9% of a step of 6,240 tokens on two H200.

torch.distributed._symmetric_memory maps buffers of other GPUs too. But its waits for another rank (`barrier`,
`wait_signal`; torch 2.13) are kernels, which hold a multiprocessor while they wait, and the module is private.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import final

import torch

from distiller.distributed.ranks import Ranks
from distiller.errors import RunError, UserError
from distiller.teachers.cuda import driver
from distiller.teachers.cuda.stream_counters import StreamCounters
from distiller.teachers.streaming.buffer_pool import BlockBuffer, Copier
from distiller.teachers.streaming.copiers import UnitBytes
from distiller.teachers.weights.gpu_copy import check_same_gpus


@final
class PeerCopier(Copier):
    """Communicates through memory, in stream order: all ranks of the node start the same units in the same buffers.

    For each (rank, buffer) there are counters: how often the buffer became free, and for every other rank, how many of
    that rank's shares have arrived. A round is one filling of one buffer; all ranks count the same rounds.
    """

    def __init__(self, unit_bytes: UnitBytes, buffers: Sequence[BlockBuffer], ranks: Ranks) -> None:
        """Maps the buffers of the node's other GPUs. Communicates. Raises UserError where that is not possible."""
        self._unit_bytes, self._ranks, self._device = unit_bytes, ranks, ranks.device
        self._rank, self._num_ranks = ranks.local_rank, ranks.local_world_size
        self._index_of = {id(buffer): i for i, buffer in enumerate(buffers)}
        self._rounds = [0] * len(buffers)
        self._copy_stream, self._send_stream = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._copied = [torch.cuda.Event() for _ in buffers]
        self._sent = [torch.cuda.Event() for _ in buffers]
        self._counters = StreamCounters(self._num_ranks * len(buffers) * (1 + self._num_ranks), ranks)
        self._mapped: dict[bytes, int] = {}
        check_same_gpus(ranks)
        with torch.cuda.device(self._device):
            self._addresses = self._map_buffers(buffers)

    def start(self, buffer: BlockBuffer) -> None:
        i, source = self._index_of[id(buffer)], self._unit_bytes(buffer.unit)
        share_bytes = source.numel() // self._num_ranks
        own = slice(self._rank * share_bytes, (self._rank + 1) * share_bytes)
        assert buffer.last_use is not None
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(buffer.last_use)
            # A unit that was never acquired: its shares may still be arriving, or be on their way to other ranks.
            self._copy_stream.wait_event(self._sent[i])
            self._wait_for_shares(i, self._copy_stream)
            self._rounds[i] += 1
            self._counters.write(self._free_counter(self._rank, i), self._rounds[i], self._copy_stream)
            buffer.data[own].copy_(source[own], non_blocking=True)
            self._copied[i].record(self._copy_stream)
        with torch.cuda.stream(self._send_stream):
            self._send_stream.wait_event(self._copied[i])
            for offset in range(1, self._num_ranks):
                # Each rank starts with the rank after it, so that not all write to the same GPU at once.
                peer = (self._rank + offset) % self._num_ranks
                self._counters.wait(self._free_counter(peer, i), self._rounds[i], self._send_stream)
                target_address = self._addresses[peer][i] + own.start
                source_address = self._addresses[self._rank][i] + own.start
                driver.copy(target_address, source_address, share_bytes, self._send_stream)
                arrived = self._arrived_counter(peer, i, self._rank)
                self._counters.write(arrived, self._rounds[i], self._send_stream)
            self._sent[i].record(self._send_stream)

    def wait(self, buffer: BlockBuffer) -> None:
        i, stream = self._index_of[id(buffer)], torch.cuda.current_stream(self._device)
        stream.wait_event(self._copied[i])
        self._wait_for_shares(i, stream)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        # Other ranks may write into this rank's buffers until they have reached this barrier.
        self._ranks.node_barrier()
        for address in set(self._mapped.values()):
            driver.unmap_memory(address)
        self._mapped.clear()
        self._counters.close()
        self._ranks.node_barrier()

    def _wait_for_shares(self, i: int, stream: torch.cuda.Stream) -> None:
        for peer in range(self._num_ranks):
            if peer != self._rank:
                self._counters.wait(self._arrived_counter(self._rank, i, peer), self._rounds[i], stream)

    def _free_counter(self, rank: int, i: int) -> int:
        return (rank * len(self._rounds) + i) * (1 + self._num_ranks)

    def _arrived_counter(self, rank: int, i: int, sender: int) -> int:
        return self._free_counter(rank, i) + 1 + sender

    def _map_buffers(self, buffers: Sequence[BlockBuffer]) -> list[list[int]]:
        """Addresses, valid in this process, of every rank's buffers: [rank on the node][buffer]. Communicates."""
        addresses: list[list[int]] = []

        def export_all() -> list[tuple[bytes, int]]:
            return [driver.export_memory(buffer.data.data_ptr()) for buffer in buffers]

        def map_all() -> None:
            for peer, of_peer in enumerate(handles):
                if peer == self._rank:
                    addresses.append([buffer.data.data_ptr() for buffer in buffers])
                    continue
                for handle, _ in of_peer:
                    # Several buffers may be in one allocation, which is mapped once.
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
    """Whether on every node each rank's GPU can write to every other rank's. Communicates; the same on all ranks.

    All nodes must use the same copier, since copiers communicate while they are made. NCCL_P2P_DISABLE=1 counts as no:
    users set it where the driver reports peer access that does not work.
    """
    gpus = ranks.gather_on_node(ranks.device.index)
    own = all(torch.cuda.can_device_access_peer(ranks.device, gpu) for gpu in gpus if gpu != ranks.device.index)
    return all(ranks.gather(own and os.environ.get("NCCL_P2P_DISABLE") != "1"))
