"""The layout of a module's weights in flat buffers: one unit for each block, and one for everything else.

A unit is copied as a whole. All placements that copy, share or read weights use the same units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from distiller.errors import RunError, UserError
from distiller.storage.weight_files import WeightFiles

ALIGNMENT = 256
"""Every tensor in a buffer starts at a multiple of this many bytes, as in CUDA's own allocations."""

PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

REST = ""
"""Name of the unit of all tensors that belong to no block."""


@final
@dataclass(frozen=True)
class Entry:
    """One tensor: all names that it has in the module (several when tied), and its offset in its unit, in bytes."""

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    is_parameter: bool

    @property
    def num_bytes(self) -> int:
        """The tensor's size."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor inside the unit's buffer (uint8, 1-D)."""
        return buffer[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)


@final
@dataclass(frozen=True)
class Unit:
    """A block, or all tensors outside of blocks (`REST`). `num_bytes` is a multiple of ALIGNMENT."""

    name: str
    entries: tuple[Entry, ...]
    num_bytes: int


def lay_out(module: nn.Module, block_names: Sequence[str]) -> list[Unit]:
    """The module's parameters and saved buffers, unit by unit: the rest first, then the blocks in their order.

    A tensor that several units share (tied weights) belongs to the rest. Buffers that are not saved belong to no unit,
    since the module computes them itself.
    """
    names_of: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    saved = set(module.state_dict(keep_vars=True))
    for name, tensor in _all_tensors(module):
        if name in saved:
            names_of.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
    members: dict[str, list[int]] = {REST: [], **{name: [] for name in block_names}}
    for key, names in names_of.items():
        owners = {_owner(name, block_names) for name in names}
        members[owners.pop() if len(owners) == 1 else REST].append(key)
    units = []
    for unit_name, keys in members.items():
        entries, offset = [], 0
        for key in keys:
            tensor = tensors[key]
            shape, is_parameter = tuple(tensor.shape), isinstance(tensor, nn.Parameter)
            entries.append(Entry(tuple(names_of[key]), tensor.dtype, shape, offset, is_parameter))
            offset += -(-entries[-1].num_bytes // ALIGNMENT) * ALIGNMENT
        units.append(Unit(unit_name, tuple(entries), offset))
    return units


def check_files(units: Sequence[Unit], files: WeightFiles, origin: str) -> None:
    """Raises UserError unless the files hold every tensor in its shape, in floating point, and nothing else.

    An unknown tensor may hold the scales of quantised weights, whose values are wrong without the scales.
    """
    known = {name for unit in units for entry in unit.entries for name in entry.names}
    if unknown := sorted(set(files.tensors) - known):
        raise UserError(
            f"{origin}: its weights hold {unknown[0]}, which the model of its config.json does not have"
            f"{f' (and {len(unknown) - 1} more such)' if len(unknown) > 1 else ''}; give the unquantised model that "
            "belongs to the config"
        )
    for unit in units:
        for entry in unit.entries:
            stored = next((files.tensors[name] for name in entry.names if name in files.tensors), None)
            if stored is None:
                raise UserError(f"{origin}: its weights lack {entry.names[0]}; copy it again")
            if stored.shape != entry.shape:
                raise UserError(
                    f"{origin}: {entry.names[0]} has shape {list(stored.shape)} in the weights and "
                    f"{list(entry.shape)} by its config.json; the two do not belong together"
                )
            if entry.dtype.is_floating_point and stored.dtype not in PLAIN_DTYPES:
                raise UserError(
                    f"{origin}: {entry.names[0]} is stored as {str(stored.dtype).removeprefix('torch.')}, so it is "
                    "quantised; give the unquantised model (teacher.quantization quantises it)"
                )


def read_unit(unit: Unit, files: WeightFiles, buffer: Tensor) -> None:
    """Reads a unit's tensors into a buffer on the CPU (uint8, at least `num_bytes` long). RunError as `read_entry`."""
    for entry in unit.entries:
        read_entry(entry, files, buffer)


def read_entry(entry: Entry, files: WeightFiles, buffer: Tensor) -> None:
    """Reads one tensor of a unit into the unit's buffer on the CPU (uint8). RunError when the file cannot be read."""
    name = next(name for name in entry.names if name in files.tensors)
    try:
        files.read(name, entry.view(buffer))
    except OSError as error:
        raise RunError(f"the teacher's weights cannot be read any more ({error}); were the files moved?") from error


@final
class Binding:
    """Parameters and buffers of a unit, ready to be set in the unit's module as views of one buffer."""

    def __init__(self, module: nn.Module, unit: Unit, buffer: Tensor | None = None) -> None:
        """Prepares views into `buffer` (uint8, 1-D, any device). None: the (meta) tensors that the module has now."""
        self._parameters: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        self._buffers: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        for entry in unit.entries:
            tensor = _get(module, entry.names[0]) if buffer is None else entry.view(buffer)
            holders = [_holder(module, name) for name in entry.names]
            if entry.is_parameter:
                value = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
                self._parameters += [(holder._parameters, attribute, value) for holder, attribute in holders]
            else:
                self._buffers += [(holder._buffers, attribute, tensor) for holder, attribute in holders]

    def bind(self) -> None:
        """Sets these tensors in the module."""
        for parameters, attribute, parameter in self._parameters:
            parameters[attribute] = parameter
        for buffers, attribute, buffer in self._buffers:
            buffers[attribute] = buffer


def bind(module: nn.Module, unit: Unit, buffer: Tensor) -> None:
    """Sets the module's tensors of this unit to views of a buffer (uint8, any device)."""
    Binding(module, unit, buffer).bind()


def move_own_buffers(module: nn.Module, device: torch.device) -> None:
    """Moves the buffers that are not saved, which the module has computed itself, to the device."""
    saved = set(module.state_dict(keep_vars=True))
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and f"{prefix}.{name}".lstrip(".") not in saved:
                child._buffers[name] = buffer.to(device)


def own_buffer_bytes(module: nn.Module) -> int:
    """Bytes of the buffers that are not saved."""
    saved = set(module.state_dict(keep_vars=True))
    return sum(buffer.nbytes for name, buffer in module.named_buffers() if name not in saved)


def _all_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _owner(name: str, block_names: Sequence[str]) -> str:
    return next((block for block in block_names if name.startswith(f"{block}.")), REST)


def _get(module: nn.Module, name: str) -> Tensor:
    holder, attribute = _holder(module, name)
    return getattr(holder, attribute)


def _holder(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that holds the tensor of this name, and the tensor's name in it."""
    owner, _, attribute = name.rpartition(".")
    return module.get_submodule(owner), attribute
