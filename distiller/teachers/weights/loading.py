"""Loads weights from files to the devices of a placement, one unit at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distiller.distributed.ranks import Ranks
from distiller.launch.block_compilation import compile_blocks
from distiller.storage.weight_files import WeightFiles
from distiller.teachers.base import Network, Setup
from distiller.teachers.streaming.copiers import FileReader
from distiller.teachers.weights.layout import Unit, bind, check_files, lay_out, move_own_buffers, read_unit

NUM_READ_THREADS = 4


@final
@dataclass
class ModulePlan:
    """One module without weights, its units, and, on ranks that read weights, its open files."""

    name: str
    module: nn.Module
    units: list[Unit]
    files: WeightFiles | None

    def close_files(self) -> None:
        """Closes the files, if this rank has them open."""
        if self.files is not None:
            self.files.close()
            self.files = None


def plan_modules(network: Network, setup: Setup, is_reader: bool, dtype: torch.dtype | None = None) -> list[ModulePlan]:
    """Every module's skeleton and layout, and on ranks that read (`is_reader`) its open files, checked by the layout.

    Blocks are compiled as the setup says. `dtype` replaces that of the setup. Communicates. Raises UserError on all
    ranks if one reader finds a fault.
    """
    plans: list[ModulePlan] = []
    for name in network.module_names:
        module = network.skeleton(name, dtype or setup.dtype)
        blocks = [module.get_submodule(block) for block in network.block_names(name)]
        compile_blocks(blocks, setup.compile_mode, sizes_vary=network.sizes_vary)
        plans.append(ModulePlan(name, module, lay_out(module, network.block_names(name)), None))

    def open_files() -> None:
        for plan in plans if is_reader else ():
            plan.files = WeightFiles(network.weight_files(plan.name), network.rename)
            check_files(plan.units, plan.files, network.origin)

    setup.ranks.all_succeed(open_files)
    return plans


def load_on_all_ranks(plan: ModulePlan, units: Iterable[Unit], ranks: Ranks) -> int:
    """Loads units on every rank's device: rank 0 reads, the others receive. Returns their bytes. Communicates.

    The host holds one unit at a time, and only on rank 0.
    """
    units = list(units)
    staging = staging_buffer(units, ranks.device) if ranks.is_main else None
    for unit in units:
        buffer = torch.empty(unit.num_bytes, dtype=torch.uint8, device=ranks.device)
        if ranks.is_main:
            assert plan.files is not None
            read_to_device(plan.files, unit, buffer, staging)
        broadcast_unit(buffer, ranks)
        bind(plan.module, unit, buffer)
    move_own_buffers(plan.module, ranks.device)
    return sum(unit.num_bytes for unit in units)


def load_units(sources: Sequence[tuple[Unit, WeightFiles]], targets: Sequence[Tensor]) -> None:
    """Reads units from files into memory (uint8, on the CPU or on GPUs), by several threads at once.

    Units for a GPU pass through page-locked staging memory. Raises RunError when the files cannot be read.
    """
    reader, units = FileReader(sources, NUM_READ_THREADS), [unit for unit, _ in sources]
    on_gpu = [i for i, target in enumerate(targets) if target.device.type != "cpu"]
    staging = staging_buffer([units[i] for i in on_gpu], targets[on_gpu[0]].device) if on_gpu else None
    for i, target in enumerate(targets):
        if target.device.type == "cpu":
            reader.read(i, target)
        else:
            assert staging is not None
            reader.read(i, staging)
            target.copy_(staging[: units[i].num_bytes])
    reader.close()


def broadcast_unit(buffer: Tensor, ranks: Ranks) -> None:
    """Broadcasts rank 0's bytes into `buffer`, which is on every rank's device. Communicates."""
    if ranks.world_size > 1 and buffer.numel():
        # A collective's timeout counts from when it is queued, and reading from a slow disk may take rank 0 longer.
        ranks.barrier()
        dist.broadcast(buffer, 0)


def read_to_device(files: WeightFiles, unit: Unit, buffer: Tensor, staging: Tensor | None) -> None:
    """Reads a unit into `buffer` (uint8); on a device other than the CPU, through page-locked staging memory."""
    if buffer.device.type == "cpu":
        read_unit(unit, files, buffer)
        return
    assert staging is not None
    read_unit(unit, files, staging)
    buffer.copy_(staging[: unit.num_bytes])


def staging_buffer(units: Sequence[Unit], device: torch.device) -> Tensor | None:
    """Page-locked memory (uint8, 1-D) for the largest of these units; None for the CPU or without units."""
    if device.type == "cpu" or not units:
        return None
    return torch.empty(max(unit.num_bytes for unit in units), dtype=torch.uint8, pin_memory=True)
