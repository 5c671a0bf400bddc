"""One copy of weights in the memory of a node's GPUs, used by all ranks of the node (CUDA IPC)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from distiller.distributed.ranks import Ranks
from distiller.errors import UserError

ADVICE = "choose placement replicated, or streamed with shard_transfers=false: they share no GPU memory"


@final
class GpuCopy:
    """A buffer on each GPU, which the node's first rank owns and the other ranks map without copying.

    On each GPU a rank reads only that GPU's own memory, so the mapping needs no peer access. Where GPUs have peer
    access, activations go from one to another without passing through the host.
    """

    def __init__(self, buffers: dict[int, Tensor], ranks: Ranks) -> None:
        """Use `make`."""
        self._buffers, self._ranks = buffers, ranks

    @staticmethod
    def make(sizes: Mapping[int, int], ranks: Ranks) -> GpuCopy:
        """Allocates and maps buffers without initialising them. `sizes` (GPU number -> bytes) is the same on all ranks.

        Communicates. Raises UserError where the ranks see different GPUs, or a rank cannot map the buffers.
        """
        check_same_gpus(ranks)
        buffers: dict[int, Tensor] = {}

        def allocate() -> list[dict[int, tuple]]:
            for gpu, num_bytes in sizes.items():
                buffers[gpu] = torch.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", gpu))
            # One handle for each receiver, since torch counts the users of the memory by handle.
            receivers = range(1, ranks.local_world_size)
            return [{gpu: reduce_tensor(buffer)[1] for gpu, buffer in buffers.items()} for _ in receivers]

        # All ranks of all nodes: otherwise other nodes would wait for one that has too little memory.
        handles = ranks.all_succeed(lambda: ranks.broadcast_from_local_main(allocate))

        def map_buffers() -> None:
            if ranks.is_local_main:
                return
            try:
                for gpu, handle in handles[ranks.local_rank - 1].items():
                    buffers[gpu] = rebuild_cuda_tensor(*handle)
            except (RuntimeError, OSError) as error:
                raise UserError(
                    f"teacher: a process cannot map GPU memory of another one here ({error}); share the containers' "
                    f"IPC and process namespaces, unset expandable_segments, or {ADVICE}"
                ) from error

        ranks.all_succeed(map_buffers)
        return GpuCopy(buffers, ranks)

    def buffer(self, gpu: int) -> Tensor:
        """A GPU's buffer: uint8, 1-D, shared."""
        return self._buffers[gpu]

    @property
    def sizes(self) -> dict[int, int]:
        """GPU number -> bytes."""
        return {gpu: buffer.nbytes for gpu, buffer in self._buffers.items()}

    def wait(self) -> None:
        """Blocks the host until this process's work on these GPUs is done."""
        for gpu in self._buffers:
            torch.cuda.synchronize(gpu)

    def close(self) -> None:
        """Frees the memory, which no tensor may refer to any more. Communicates: the owner frees it last."""
        self.wait()
        if not self._ranks.is_local_main:
            self._buffers.clear()
        self._ranks.node_barrier()
        self._buffers.clear()
        torch.cuda.ipc_collect()
        # Other ranks train on GPUs of which this process's allocator would keep the memory.
        torch.cuda.empty_cache()


def check_same_gpus(ranks: Ranks) -> None:
    """Raises UserError unless all ranks of the node see the same GPUs under the same numbers. Communicates."""
    own = [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in range(torch.cuda.device_count())]
    seen = ranks.gather_on_node(own)

    def compare() -> None:
        if any(gpus != seen[0] for gpus in seen):
            raise UserError(
                "teacher: the ranks of this node do not see the same GPUs (CUDA_VISIBLE_DEVICES differs between "
                f"them); let every rank see all of them, or {ADVICE}"
            )

    ranks.all_succeed(compare)
