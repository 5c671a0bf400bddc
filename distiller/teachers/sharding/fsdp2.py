"""Shards modules by torch's FSDP2: one group of parameters for each block, and one for all other parameters."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from distiller.config.placements.sharded import ShardedOptions
from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.teachers.base import Network, Setup
from distiller.teachers.sharding.sharded_modules import ShardedModules, broadcast_units
from distiller.teachers.weights.host_copy import HostCopy
from distiller.teachers.weights.layout import ALIGNMENT, REST, Entry, Unit, move_own_buffers
from distiller.teachers.weights.loading import ModulePlan, load_on_all_ranks, plan_modules


@final
class FullyShardedModules(ShardedModules):
    """FSDP2 over all ranks. With one rank nothing is sharded, and its device holds everything.

    Parameters are split along their first dimension. What FSDP2 cannot split is replicated on every rank's device:
    buffers, scalars, and parameters that a block shares with something outside of it (tied weights).
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        """Communicates. Raises UserError before any weight is read."""
        _check(setup)
        ranks, options = setup.ranks, ShardedOptions.of(setup.options)
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
        if setup.options.prefetch_steps:
            mesh = DeviceMesh.from_group(ranks.new_device_group(), ranks.device.type)
        else:
            mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
        for plan in plans:
            _split(plan, mesh, CPUOffloadPolicy(locks_pages) if offloads else OffloadPolicy())
        sizes = [
            sum(_aligned(num_bytes) for _, num_bytes in _even_shards(plan, unit))
            for plan in plans
            for unit in plan.units
        ]
        if offloads:
            self._host = ranks.all_succeed(lambda: _allocate_host(sizes, ranks, locks_pages))
        memory = self._allocate(sizes)
        for plan in plans:
            # Strict: a tensor that was not loaded raises here, not as a meta tensor in the first forward pass.
            plan.module.load_state_dict(self._read(plan, memory, ranks), assign=True)
            move_own_buffers(plan.module, ranks.device)

    def release_forward_state(self, name: str) -> None:
        module = self.modules[name]
        if isinstance(module, FSDPModule):
            # FSDP2 records the order of every forward pass until the backward pass after it. Without a backward pass
            # the record grows by 2 kB a pass in a model of 40 blocks. (`reset_iter_state` came only with torch 2.13.)
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
            # The last copies may still read from the memory that is freed now.
            torch.cuda.synchronize(self._device)
        self.modules.clear()
        # FSDP2's modules, states and groups refer to each other, so only garbage collection frees them.
        gc.collect()
        if self._host is not None:
            self._host.close()

    def _allocate(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Memory (uint8, 1-D) for the shards of each unit, in order; on the host if offloaded, else on the device."""
        for i, size in enumerate(sizes):
            if self._host is None:
                yield torch.empty(size, dtype=torch.uint8, device=self._device)
            else:
                yield self._host.piece(i)

    def _read(self, plan: ModulePlan, memory: Iterator[Tensor], ranks: Ranks) -> dict[str, Tensor]:
        """The module's state dict on this rank: its rows of sharded tensors, and the whole of replicated ones."""
        state: dict[str, Tensor] = {}
        for unit, whole in broadcast_units(plan, ranks):
            buffer, even_names = next(memory), {entry.names[0] for entry, _ in _even_shards(plan, unit)}
            for entry in unit.entries:
                target, value = _target(plan.module, entry), entry.view(whole)
                if isinstance(target, DTensor):
                    own = value[_num_rows_of_rank_0(target) * ranks.rank :][: len(target.to_local())]
                    if entry.names[0] in even_names:
                        shard, buffer = buffer[: own.nbytes], buffer[_aligned(own.nbytes) :]
                        shard = shard.view(entry.dtype).view(own.shape).copy_(own)
                    else:
                        shard = own.to(self._device if self._host is None else "cpu", copy=True)
                    kept = _like(target, shard)
                else:
                    kept = value.clone()
                if entry.is_parameter:
                    kept = nn.Parameter(kept, requires_grad=False)
                state |= dict.fromkeys(entry.names, kept)
        return state


def _split(plan: ModulePlan, mesh: DeviceMesh, policy: OffloadPolicy) -> None:
    """Turns a module's parameters into shards on the meta device, which its forward passes gather block by block."""
    blocks = [unit.name for unit in plan.units if unit.name != REST]
    replicated = {
        plan.module.get_parameter(entry.names[0])
        for unit in plan.units
        for entry in unit.entries
        if entry.is_parameter and (not entry.shape or (unit.name == REST and _is_in_block(entry, blocks)))
    }
    for module in (*(plan.module.get_submodule(block) for block in blocks), plan.module):
        # Reshard the root too, which by default keeps its own parameters gathered after the first pass.
        fully_shard(module, mesh=mesh, reshard_after_forward=True, offload_policy=policy, ignored_params=replicated)


def _check(setup: Setup) -> None:
    offload = ShardedOptions.of(setup.options).offload
    assert offload != "nvme", "its specification refuses it"
    if offload == "cpu" and setup.ranks.world_size == 1 and setup.ranks.device.type == "cuda":
        raise UserError(
            "teacher.offload is cpu and one process runs, which has nobody to share with; use "
            "teacher.placement=streamed, which keeps the weights in host memory and copies blocks ahead of use"
        )


def _allocate_host(sizes: Sequence[int], ranks: Ranks, locks_pages: bool) -> HostCopy:
    """Host memory of this rank alone, for pieces of these sizes. Raises UserError when there is too little."""
    host = HostCopy.make(sizes, ranks.as_single_process())
    if locks_pages:
        host.page_lock()
    return host


def _even_shards(plan: ModulePlan, unit: Unit) -> list[tuple[Entry, int]]:
    """(Entry, bytes) of this rank's full-size shards in a unit.

    If the rows do not divide evenly, the last ranks have shorter shards. Those are left out, since FSDP2 keeps a padded
    copy of them instead.
    """
    shards: list[tuple[Entry, int]] = []
    for entry in unit.entries:
        target = _target(plan.module, entry)
        if isinstance(target, DTensor) and len(target.to_local()) == _num_rows_of_rank_0(target):
            shards.append((entry, target.to_local().nbytes))
    return shards


def _target(module: nn.Module, entry: Entry) -> Tensor:
    return module.get_parameter(entry.names[0]) if entry.is_parameter else module.get_buffer(entry.names[0])


def _num_rows_of_rank_0(target: DTensor) -> int:
    return -(-len(target) // target.device_mesh.size())


@torch.no_grad()
def _like(target: DTensor, shard: Tensor) -> Tensor:
    # Not by `DTensor.from_local`, which moves host memory to the mesh's GPU.
    return DTensor(shard, target._spec, requires_grad=False)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _is_in_block(entry: Entry, blocks: Sequence[str]) -> bool:
    return any(name.startswith(f"{block}.") for name in entry.names for block in blocks)
