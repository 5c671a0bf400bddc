"""Shards by torch's FSDP2: one group of parameters for each block, and one for the rest."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.teachers.base import Network, Setup
from distiller.teachers.sharding.sharded_modules import Shards, units_in_turn
from distiller.teachers.weights.host_copy import HostCopy
from distiller.teachers.weights.layout import ALIGNMENT, REST, Entry, Unit, move_own_buffers
from distiller.teachers.weights.loading import Plan, load_on_all_ranks, plan_modules


class FullyShardedModules(Shards):
    """FSDP2 over all ranks. With one process there is nobody to share with: its device holds everything.

    Parameters are split along their first axis. What FSDP2 cannot split stays whole on every rank's device: buffers,
    scalars, and parameters that a block has in common with something outside of it (tied weights).
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        """Communicates. Raises UserError before any weight is read."""
        _check(setup)
        ranks, options = setup.ranks, setup.options
        self._device, self._host = ranks.device, None
        plans = plan_modules(network, setup, is_reader=ranks.is_main)
        self.modules = {plan.name: plan.module for plan in plans}
        if ranks.world_size == 1:
            for plan in plans:
                load_on_all_ranks(plan, plan.units, ranks)
                plan.close_files()
            return
        offloads = options.offload == "cpu"
        locks_pages = offloads and options.pin_memory and ranks.device.type == "cuda"
        mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
        for plan in plans:
            _split(plan, mesh, CPUOffloadPolicy(locks_pages) if offloads else OffloadPolicy())
        sizes = [sum(_aligned(share) for _, share in _even(plan, unit)) for plan in plans for unit in plan.units]
        if offloads:
            self._host = ranks.all_succeed(lambda: _host_memory(sizes, ranks, locks_pages))
        memory = self._memory(sizes)
        for plan in plans:
            # Strict: what was not filled raises here, not as a meta tensor in the first forward.
            plan.module.load_state_dict(self._read(plan, memory, ranks), assign=True)
            move_own_buffers(plan.module, ranks.device)

    def settle(self, name: str) -> None:
        module = self.modules[name]
        if isinstance(module, FSDPModule):
            # FSDP2 notes every forward for the backward after it, and forgets it there. Here there is none, and the
            # notes would grow by 2 kB a pass in a model of 40 blocks. (`reset_iter_state` came only with torch 2.13.)
            order = module._get_fsdp_state()._comm_ctx.post_forward_order
            for group in order:
                group._post_forward_indices.clear()
            order.clear()

    def tensors(self) -> Iterator[Tensor]:
        for module in self.modules.values():
            for tensor in (*module.parameters(), *module.buffers()):
                yield tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def close(self) -> None:
        if self._device.type == "cuda":
            # The last copies may still read from the memory that goes now.
            torch.cuda.synchronize(self._device)
        self.modules.clear()
        # FSDP2's modules, states and groups refer to each other: without this they would stay until a collection.
        gc.collect()
        if self._host is not None:
            self._host.close()

    def _memory(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Room for the shares of each unit, in turn."""
        for number, size in enumerate(sizes):
            if self._host is None:
                yield torch.empty(size, dtype=torch.uint8, device=self._device)
            else:
                yield self._host.piece(number)

    def _read(self, plan: Plan, memory: Iterator[Tensor], ranks: Ranks) -> dict[str, Tensor]:
        """The module's state as this rank holds it: its rows of what is split, and the whole of what is not."""
        state: dict[str, Tensor] = {}
        for unit, whole in units_in_turn(plan, ranks):
            buffer, even = next(memory), {entry.names[0] for entry, _ in _even(plan, unit)}
            for entry in unit.entries:
                target, value = _target(plan.module, entry), entry.view(whole)
                if isinstance(target, DTensor):
                    own = value[_rows_of_rank_0(target) * ranks.rank :][: len(target.to_local())]
                    if entry.names[0] in even:
                        share, buffer = buffer[: own.nbytes], buffer[_aligned(own.nbytes) :]
                        share = share.view(entry.dtype).view(own.shape).copy_(own)
                    else:
                        share = own.to(self._device if self._host is None else "cpu", copy=True)
                    kept = _placed_as(target, share)
                else:
                    kept = value.clone()
                if entry.is_parameter:
                    kept = nn.Parameter(kept, requires_grad=False)
                state |= dict.fromkeys(entry.names, kept)
        return state


def _split(plan: Plan, mesh: DeviceMesh, policy: OffloadPolicy) -> None:
    """Turns a module's parameters into shards on the meta device, and lets its forward passes gather them by block."""
    blocks = [unit.name for unit in plan.units if unit.name != REST]
    whole = {
        plan.module.get_parameter(entry.names[0])
        for unit in plan.units
        for entry in unit.entries
        if entry.is_parameter and (not entry.shape or (unit.name == REST and _reaches_into(entry, blocks)))
    }
    for module in (*(plan.module.get_submodule(block) for block in blocks), plan.module):
        # True also for the root, which would keep the rest of the weights whole after its first pass.
        fully_shard(module, mesh=mesh, reshard_after_forward=True, offload_policy=policy, ignored_params=whole)


def _check(setup: Setup) -> None:
    assert setup.options.offload != "nvme", "rules.check_placement refuses it"
    if setup.options.offload == "cpu" and setup.ranks.world_size == 1 and setup.ranks.device.type == "cuda":
        raise UserError(
            "teacher.offload is cpu and one process runs, which has nobody to share with; use "
            "teacher.placement=streamed, which keeps the weights in host memory and copies blocks ahead of use"
        )


def _host_memory(sizes: Sequence[int], ranks: Ranks, locks_pages: bool) -> HostCopy:
    """Room of this rank's own in host memory. Raises UserError when there is too little."""
    alone = replace(ranks, rank=0, world_size=1, local_rank=0, local_world_size=1, world_group=None, node_group=None)
    host = HostCopy.make(sizes, alone)
    if locks_pages:
        host.page_lock()
    return host


def _even(plan: Plan, unit: Unit) -> list[tuple[Entry, int]]:
    """What fills this rank's share of a unit, and its bytes.

    Not the shorter shares that last ranks have where the division leaves a rest: FSDP2 pads a copy of its own of those.
    """
    found = []
    for entry in unit.entries:
        target = _target(plan.module, entry)
        if isinstance(target, DTensor) and len(target.to_local()) == _rows_of_rank_0(target):
            found.append((entry, target.to_local().nbytes))
    return found


def _target(module: nn.Module, entry: Entry) -> Tensor:
    return module.get_parameter(entry.names[0]) if entry.is_parameter else module.get_buffer(entry.names[0])


def _rows_of_rank_0(target: DTensor) -> int:
    return -(-len(target) // target.device_mesh.size())


@torch.no_grad()
def _placed_as(target: DTensor, share: Tensor) -> Tensor:
    # Not `from_local`, which moves what is in host memory to the mesh's GPU.
    return DTensor(share, target._spec, requires_grad=False)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _reaches_into(entry: Entry, blocks: Sequence[str]) -> bool:
    return any(name.startswith(f"{block}.") for name in entry.names for block in blocks)
