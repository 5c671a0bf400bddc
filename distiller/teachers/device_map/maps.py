"""Accelerate's device maps (which part of a module is on which device), made by its functions or by the recipe."""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false
from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from accelerate.utils import get_balanced_memory, infer_auto_device_map
from torch import nn

from distiller.distributed.free_memory import free_gpu_bytes, free_host_bytes
from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.teachers.base import Setup
from distiller.teachers.footprint import kept_for_updates

Location = int | str
"""A GPU's number, `cpu` or `disk`. On a machine without GPUs the numbers are those of the node's ranks."""

DeviceMap = dict[str, Location]
"""Name of a submodule or tensor -> its location; the longest name counts, and the empty one stands for all the rest."""

ACTIVATION_SHARE = 0.1
"""Share of a GPU's free memory that a device map leaves for activations."""

CONTEXT_BYTES = 2**29
"""Bytes that a process takes on each GPU that it computes on, before any tensor: CUDA's context and kernels."""


def balanced_map(module: nn.Module, block_names: Sequence[str], budgets: Mapping[int, int]) -> DeviceMap:
    """A map with about equal bytes on each device. `budgets`: device number -> bytes that it has for the module.

    Tensors that exceed the budgets are mapped to `disk`. Sizes follow from each tensor's own dtype; blocks are never
    split.
    """
    classes = _block_classes(module, block_names)
    with _unknown_devices_allowed():
        shares = get_balanced_memory(module, dict(budgets), no_split_module_classes=classes)
    return _infer(module, classes, shares)


def sequential_map(module: nn.Module, block_names: Sequence[str], budgets: Mapping[int, int]) -> DeviceMap:
    """A map that fills each device before the next one; otherwise as `balanced_map`."""
    return _infer(module, _block_classes(module, block_names), dict(budgets))


def location_of(name: str, device_map: Mapping[str, Location]) -> Location | None:
    """Location of a tensor or submodule; None where the map does not cover it."""
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return device_map[name]


def num_devices(ranks: Ranks) -> int:
    """Number of devices that a map may use: the node's GPUs, or on a machine without GPUs its ranks."""
    return torch.cuda.device_count() if ranks.device.type == "cuda" else ranks.local_world_size


def check_custom_map(device_map: Mapping[str, Location], modules: Sequence[nn.Module], num_devices: int) -> None:
    """Raises UserError for an unknown name, a device number out of range, or a tensor without a location."""
    known = {""}
    for module in modules:
        known.update(name for name, _ in module.named_modules(remove_duplicate=False))
        known.update(name for name, _ in module.named_parameters(remove_duplicate=False))
        known.update(name for name, _ in module.named_buffers(remove_duplicate=False))
    for name, location in device_map.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "its names are those of the module's parameters"
            raise UserError(f"teacher.device_map: {name!r} is no part of the teacher; {hint}")
        if isinstance(location, int) and location >= num_devices:
            raise UserError(
                f"teacher.device_map: {name!r} is on {location}, and this node has {num_devices} "
                f"{'GPU(s)' if torch.cuda.is_available() else 'rank(s), which stand for GPUs here'}, counted from 0; "
                f"give at most {num_devices - 1}, cpu or disk"
            )
    for module in modules:
        missing = [name for name in module.state_dict(keep_vars=True) if location_of(name, device_map) is None]
        if missing:
            others = f" and {len(missing) - 1} other tensors" if len(missing) > 1 else ""
            raise UserError(
                f"teacher.device_map says nothing about {missing[0]}{others}; add their names, or '' for all the rest"
            )


def budgets_of_devices(
    setup: Setup, gpus_of_ranks: Sequence[int | None], kept_share: float = ACTIVATION_SHARE
) -> dict[int, int]:
    """Device number -> bytes that it has for the teacher.

    A GPU's budget is its free memory without what is kept for updates (`kept_share` of it, or less; see
    `kept_for_updates`), without the student's state if a rank trains on it (`gpus_of_ranks`), and without a CUDA
    context for every rank, since all ranks compute on every GPU. Without GPUs, each number has all of the same free
    host memory.
    """
    ranks = setup.ranks
    if ranks.device.type == "cpu":
        return dict.fromkeys(range(ranks.local_world_size), free_host_bytes())
    budgets = {}
    for gpu in range(torch.cuda.device_count()):
        free = free_gpu_bytes(torch.device("cuda", gpu))
        kept = kept_for_updates(setup, free, 1 - kept_share) + ranks.local_world_size * CONTEXT_BYTES
        budgets[gpu] = max(free - kept - (setup.reserved_bytes if gpu in gpus_of_ranks else 0), 0)
    return budgets


@final
@dataclass(frozen=True)
class Packing:
    """Device maps of a teacher's modules, and whether its devices have the bytes for them.

    Attributes:
        maps: one for each module.
        needed: device number -> bytes that the maps put there.
        unplaced: bytes that fit on no device.
        budgets: device number -> bytes that it has.
    """

    maps: list[DeviceMap]
    needed: Mapping[int, int]
    unplaced: int
    budgets: Mapping[int, int]

    @property
    def fits(self) -> bool:
        """Whether everything is on a device, and no device needs more than its budget."""
        return not self.unplaced and all(self.needed[device] <= self.budgets[device] for device in self.needed)

    def check(self, placement: str, advice: str) -> None:
        """Raises UserError unless everything fits. `advice`, the end of the message, says what to choose instead."""
        if self.fits:
            return
        total = sum(self.needed.values()) + self.unplaced
        free = ", ".join(f"{device}: {_gib(num_bytes)}" for device, num_bytes in self.budgets.items())
        wanted = ", ".join(f"{device}: {_gib(num_bytes)}" for device, num_bytes in sorted(self.needed.items()))
        raise UserError(
            f"teacher.placement={placement} needs {_gib(total)} ({wanted}; without a place: {_gib(self.unplaced)}), "
            f"and beside the student and activations these devices have {free}; {advice}"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _block_classes(module: nn.Module, block_names: Sequence[str]) -> list[str]:
    return sorted({type(module.get_submodule(name)).__name__ for name in block_names})


def _infer(module: nn.Module, classes: list[str], max_memory: dict[int, int]) -> DeviceMap:
    with _unknown_devices_allowed():
        found = infer_auto_device_map(module, max_memory, no_split_module_classes=classes, offload_buffers=True)
    return {name: location for name, location in found.items() if isinstance(location, int | str)}


@contextmanager
def _unknown_devices_allowed() -> Iterator[None]:
    """Silences Accelerate's warning about device numbers without a GPU, since ranks may stand for GPUs."""
    logger = logging.getLogger("accelerate.utils.modeling")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
