"""`teacher.placement: swap`: the teacher is in host memory, and each module is copied whole to the device to run.

The same as `.to("cuda")` before a module runs and `.to("cpu")` after it, except that nothing is copied back, since the
weights are frozen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distiller.config.placements.swap import SwapOptions
from distiller.distributed.free_memory import free_host_bytes
from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.teachers.base import ModuleCalls, Network, Outputs, Request, Setup, Teacher, TeacherMemory, answer
from distiller.teachers.quantization.modules import plan_quantized_modules
from distiller.teachers.weights.host_copy import HostCopy
from distiller.teachers.weights.layout import Binding, bind, own_buffer_bytes, read_unit
from distiller.teachers.weights.loading import ModulePlan


@final
class SwapTeacher(Teacher):
    """Every rank has its own host copy, and nothing on its device while the student trains.

    Within `predict` one whole module at a time is on the device. Communicates only while loading. Raises UserError if
    the node's memory is too small for one copy for each of its ranks.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        self._network, self._ranks = network, setup.ranks
        plans = plan_quantized_modules(network, setup, is_reader=setup.ranks.is_main)
        sizes = [unit.num_bytes for plan in plans for unit in plan.units]
        self._ranks.all_succeed(lambda: _check_host_memory(sum(sizes), self._ranks.local_world_size))
        self._host = self._ranks.all_succeed(lambda: HostCopy.make(sizes, self._ranks.as_single_process()))
        if SwapOptions.of(setup.options).pin_memory and self._ranks.device.type == "cuda":
            # Before weights are read, so that a driver that refuses to page-lock memory does it early.
            self._ranks.all_succeed(self._host.page_lock)
        pieces = iter([self._host.piece(index) for index in range(len(sizes))])
        self._modules = {plan.name: _SwappedModule(plan, [next(pieces) for _ in plan.units]) for plan in plans}
        for plan in plans:
            self._modules[plan.name].fill(plan, self._ranks)
            plan.close_files()
        self._num_bytes = self._host.num_bytes + sum(own_buffer_bytes(plan.module) for plan in plans)

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        return answer(self._network, requests, self._run)

    def memory(self) -> TeacherMemory:
        return TeacherMemory(host_bytes=self._num_bytes * self._ranks.local_world_size)

    def close(self) -> None:
        if self._ranks.device.type == "cuda":
            # The last copies may still read from the memory that is freed now.
            torch.cuda.synchronize(self._ranks.device)
        self._modules.clear()
        self._host.close()
        self._num_bytes = 0

    def _run(self, agenda: ModuleCalls) -> list[list[Outputs]]:
        results = []
        for name, calls in agenda:
            with self._modules[name].on(self._ranks.device) as module:
                results.append([self._network.run(module, call) for call in calls])
        return results


@final
class _SwappedModule:
    """A module whose weights are in host memory, and whose parameters are on the meta device while it does not run."""

    def __init__(self, plan: ModulePlan, pieces: Sequence[Tensor]) -> None:
        self._module, self._units, self._pieces = plan.module, plan.units, pieces
        self._on_meta = [Binding(plan.module, unit) for unit in plan.units]
        self._own_buffers = [
            (child._buffers, name, buffer)
            for child in plan.module.modules()
            for name, buffer in child._buffers.items()
            if buffer is not None and not buffer.is_meta
        ]

    def fill(self, plan: ModulePlan, ranks: Ranks) -> None:
        """Rank 0 reads each unit into its host copy, and the other ranks receive it into their own. Communicates."""
        for unit, piece in zip(self._units, self._pieces, strict=True):
            if ranks.is_main:
                assert plan.files is not None
                read_unit(unit, plan.files, piece)
            if ranks.world_group is not None and unit.num_bytes:
                # In the gloo group: the default group may support GPU tensors only.
                dist.broadcast(piece, 0, ranks.world_group)

    @contextmanager
    def on(self, device: torch.device) -> Iterator[nn.Module]:
        """Yields the module with its weights on the device; afterwards they are only in host memory again."""
        try:
            for unit, piece in zip(self._units, self._pieces, strict=True):
                buffer = torch.empty(unit.num_bytes, dtype=torch.uint8, device=device)
                bind(self._module, unit, buffer.copy_(piece, non_blocking=True))
            for table, name, buffer in self._own_buffers:
                table[name] = buffer.to(device)
            yield self._module
        finally:
            for binding in self._on_meta:
                binding.bind()
            for table, name, buffer in self._own_buffers:
                table[name] = buffer


def _check_host_memory(num_bytes: int, num_copies: int) -> None:
    free = free_host_bytes()
    if num_bytes * num_copies > free:
        raise UserError(
            f"teacher.placement swap takes {num_bytes / 2**30:.2f} GiB of host memory for each of this node's "
            f"{num_copies} rank(s), and {free / 2**30:.2f} GiB are free; choose streamed (one copy for all ranks) or "
            "disk (none)"
        )
