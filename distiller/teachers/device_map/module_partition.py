"""Splits a module into partitions by a device map, and its units into groups of tensors by location."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import nn

from distiller.errors import UserError
from distiller.teachers.device_map.maps import Location, location_of
from distiller.teachers.weights.layout import ALIGNMENT, REST, Entry, Unit
from distiller.teachers.weights.loading import ModulePlan


@final
@dataclass(frozen=True)
class ModulePartition:
    """A submodule that computes on one device.

    Attributes:
        path: the submodule's name; empty for the whole module.
        names: of its saved tensors, without those of other partitions inside it.
        location: of these tensors.
        output_location: where its outputs are moved to; None leaves them where they are.
    """

    path: str
    names: tuple[str, ...]
    location: Location
    output_location: Location | None


@final
@dataclass(frozen=True)
class TensorGroup:
    """Tensors of a module that are resident, or onloaded, together as one run of bytes.

    Attributes:
        stored: the layout for reading them from files, with all names that each tensor has.
        bound: the same layout with only the names that a tensor has in this group.
    """

    module_name: str
    location: Location
    stored: Unit
    bound: Unit


def partition_module(
    plan: ModulePlan, device_map: Mapping[str, Location], is_resident: Callable[[Location], bool]
) -> list[ModulePartition]:
    """The largest submodules whose tensors have one location; the first is always the whole module.

    Only modules with a forward pass are partitions, since hooks run around it: a `ModuleList` is split, and its own
    tensors (those of a `ParameterList`) count for the module that contains it.
    Tensors that are not resident are onloaded when their partition runs, so a module that contains blocks is split
    unless all its tensors are resident. A block's output stays on its device, for the next block. The output of any
    other partition moves to where the surrounding module computes, which is the location of that module's own tensors.

    Raises:
        UserError: a module's own tensors have several locations, and its forward pass uses them on one device.
    """
    saved = list(plan.module.state_dict(keep_vars=True))
    block_names = _blocks(plan)

    def walk(path: str, child: nn.Module, parent_location: Location | None) -> Iterator[ModulePartition]:
        prefix = f"{path}." if path else ""
        names = [name for name in saved if name.startswith(prefix)]
        if not names:
            return
        locations = [_location(name, device_map) for name in names]
        output_location = None if not path or path in block_names else parent_location
        holds_blocks = any(block.startswith(prefix) for block in block_names)
        runs = not path or type(child).forward is not nn.Module.forward
        if runs and len(set(locations)) == 1 and (is_resident(locations[0]) or not holds_blocks):
            yield ModulePartition(path, tuple(names), locations[0], output_location)
            return
        located = zip(names, locations, strict=True)
        owned = set(_own_names(child, prefix)) if runs else set[str]()
        own = {name: location for name, location in located if name in owned}
        if len(set(own.values())) > 1:
            listed = ", ".join(f"{name} on {location}" for name, location in own.items())
            raise UserError(
                f"teacher.device_map: {path or 'the teacher'} uses its own tensors in one place; not {listed}"
            )
        own_location = next(iter(own.values()), locations[0] if parent_location is None else parent_location)
        if own or not path:
            yield ModulePartition(path, tuple(own), own_location, output_location)
        for name, grandchild in child.named_children():
            yield from walk(prefix + name, grandchild, own_location)

    return list(walk("", plan.module, None))


def _own_names(module: nn.Module, prefix: str) -> Iterator[str]:
    """Names of the tensors that the module's own forward pass uses, also out of containers without a forward pass."""
    for name in (*module._parameters, *module._buffers):
        yield prefix + name
    for name, child in module.named_children():
        if type(child).forward is nn.Module.forward:
            yield from _own_names(child, f"{prefix}{name}.")


def resident_groups(
    plan: ModulePlan, device_map: Mapping[str, Location], is_resident: Callable[[Location], bool]
) -> list[TensorGroup]:
    """The resident tensors, grouped by location and unit. A tied tensor is in a group of each location of its names."""
    locations: dict[Location, None] = {}
    for unit in plan.units:
        for entry in unit.entries:
            locations.update(dict.fromkeys(_location(name, device_map) for name in entry.names))
    groups: list[TensorGroup] = []
    for location in filter(is_resident, locations):
        for unit in plan.units:
            kept = [
                (entry, tuple(name for name in entry.names if _location(name, device_map) == location))
                for entry in unit.entries
            ]
            group = _pack(plan.name, location, unit.name, [(entry, names) for entry, names in kept if names])
            groups += [group] if group.stored.entries else []
    return groups


def onloaded_group(plan: ModulePlan, partition: ModulePartition) -> TensorGroup:
    """The tensors to onload when a partition that is not resident runs; its units are named by the partition's path."""
    own = set(partition.names)
    kept = [(entry, tuple(n for n in entry.names if n in own)) for unit in plan.units for entry in unit.entries]
    return _pack(plan.name, partition.location, partition.path, [(entry, names) for entry, names in kept if names])


def separate_shared_names(plan: ModulePlan) -> None:
    """Gives every use of a shared (tied) tensor or submodule a separate parameter, for a device of its own.

    Weights must be on the meta device. The layout, which records what is shared, must be made before.
    """
    module, seen = plan.module, set[int]()
    for path, child in list(module.named_modules(remove_duplicate=False)):
        if id(child) in seen:
            parent, _, attribute = path.rpartition(".")
            module.get_submodule(parent)._modules[attribute] = copy.deepcopy(child)
        seen.add(id(child))
    for entry in (entry for unit in plan.units for entry in unit.entries):
        in_blocks = [name for name in entry.names if any(name.startswith(f"{block}.") for block in _blocks(plan))]
        for name in in_blocks if len(entry.names) > 1 else ():
            owner, _, attribute = name.rpartition(".")
            holder = module.get_submodule(owner)
            empty = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            if entry.is_parameter:
                holder._parameters[attribute] = nn.Parameter(empty, requires_grad=False)
            else:
                holder._buffers[attribute] = empty


def _blocks(plan: ModulePlan) -> list[str]:
    return [unit.name for unit in plan.units if unit.name != REST]


def _location(name: str, device_map: Mapping[str, Location]) -> Location:
    location = location_of(name, device_map)
    assert location is not None
    return location


def _pack(
    module_name: str, location: Location, name: str, kept: Sequence[tuple[Entry, tuple[str, ...]]]
) -> TensorGroup:
    """The group of these tensors, laid out from offset 0. `kept`: (tensor, names that it has in this group)."""
    entries, offset = [], 0
    for entry, _ in kept:
        entries.append(replace(entry, offset=offset))
        offset += -(-entry.num_bytes // ALIGNMENT) * ALIGNMENT
    bound = [replace(entry, names=names) for entry, (_, names) in zip(entries, kept, strict=True)]
    return TensorGroup(module_name, location, Unit(name, tuple(entries), offset), Unit(name, tuple(bound), offset))
