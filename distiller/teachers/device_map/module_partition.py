"""The parts of a module that a device map holds apart, and what of each unit lies where."""

# Types here are wider than what is passed on; to be narrowed in the code.
# pyright: reportArgumentType=false
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from distiller.errors import UserError
from distiller.teachers.device_map.maps import Location, location_of
from distiller.teachers.weights.layout import ALIGNMENT, REST, Entry, Unit
from distiller.teachers.weights.loading import Plan


@dataclass(frozen=True)
class ModulePartition:
    """A submodule that computes in one place.

    Attributes:
        path: its name; empty for the module itself.
        names: the saved tensors that it holds there: all, or where its submodules have places of their own, those
            that belong to none of them.
        location: where they lie.
        outputs_to: where its outputs go; None leaves them where they are.
    """

    path: str
    names: tuple[str, ...]
    location: Location
    outputs_to: Location | None


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of a module that lie, or come in, together: one run of bytes.

    `stored` is how they are read, with all names that a tensor has; `bound` the same with the names that are here.
    """

    module_name: str
    location: Location
    stored: Unit
    bound: Unit


def partition_module(
    plan: Plan, device_map: Mapping[str, Location], is_resident: Callable[[Location], bool]
) -> list[ModulePartition]:
    """The largest submodules that lie in one place; the module itself is always the first.

    What is not resident comes in for a forward pass, so it is split down to blocks at least. A block's output stays
    where it is, for the next block; every other one's goes to where the surrounding module computes, which is where
    that one's own tensors are.

    Raises UserError when a module's own tensors are to lie apart: its forward pass uses them in one place.
    """
    saved = list(plan.module.state_dict(keep_vars=True))
    block_names = _blocks(plan)

    def walk(path: str, child: nn.Module, home: Location | None) -> Iterator[ModulePartition]:
        prefix = f"{path}." if path else ""
        names = [name for name in saved if name.startswith(prefix)]
        if not names:
            return
        locations = [location_of(name, device_map) for name in names]
        assert None not in locations
        outputs_to = None if not path or path in block_names else home
        holds_blocks = any(block.startswith(prefix) for block in block_names)
        if len(set(locations)) == 1 and (is_resident(locations[0]) or not holds_blocks):
            yield ModulePartition(path, tuple(names), locations[0], outputs_to)
            return
        own = {name: at for name, at in zip(names, locations, strict=True) if "." not in name.removeprefix(prefix)}
        if len(set(own.values())) > 1:
            told = ", ".join(f"{name} on {at}" for name, at in own.items())
            raise UserError(
                f"teacher.device_map: {path or 'the teacher'} uses its own tensors in one place; not {told}"
            )
        here = next(iter(own.values()), locations[0] if home is None else home)
        if own or not path:
            yield ModulePartition(path, tuple(own), here, outputs_to)
        for name, grandchild in child.named_children():
            yield from walk(prefix + name, grandchild, here)

    return list(walk("", plan.module, None))


def resident_groups(
    plan: Plan, device_map: Mapping[str, Location], is_resident: Callable[[Location], bool]
) -> list[TensorGroup]:
    """What stays where it lies, by location and unit. A tensor with several names is there once for each location."""
    locations: dict[Location, None] = {}
    for unit in plan.units:
        for entry in unit.entries:
            locations.update(dict.fromkeys(_at(name, device_map) for name in entry.names))
    parts = []
    for location in filter(is_resident, locations):
        for unit in plan.units:
            kept = [
                (entry, tuple(name for name in entry.names if _at(name, device_map) == location))
                for entry in unit.entries
            ]
            part = _pack(plan.name, location, unit.name, [(entry, names) for entry, names in kept if names])
            parts += [part] if part.stored.entries else []
    return parts


def onloaded_group(plan: Plan, place: ModulePartition) -> TensorGroup:
    """What comes in together when a place that is not resident runs; its units are named by the place's path."""
    here = set(place.names)
    kept = [(entry, tuple(n for n in entry.names if n in here)) for unit in plan.units for entry in unit.entries]
    return _pack(plan.name, place.location, place.path, [(entry, names) for entry, names in kept if names])


def separate_shared_names(plan: Plan) -> None:
    """Makes the names of a shared tensor independent, where they are in different units or one module has them all.

    One device may then have the tensor under one name, and another device under the next. Weights must be on the meta
    device; the layout, which knows what is shared, is made before.
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
            table = holder._parameters if entry.is_parameter else holder._buffers
            empty = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            table[attribute] = nn.Parameter(empty, requires_grad=False) if entry.is_parameter else empty


def _blocks(plan: Plan) -> list[str]:
    return [unit.name for unit in plan.units if unit.name != REST]


def _at(name: str, device_map: Mapping[str, Location]) -> Location:
    location = location_of(name, device_map)
    assert location is not None
    return location


def _pack(
    module_name: str, location: Location, name: str, kept: Sequence[tuple[Entry, tuple[str, ...]]]
) -> TensorGroup:
    entries, offset = [], 0
    for entry, _ in kept:
        entries.append(replace(entry, offset=offset))
        offset += -(-entry.num_bytes // ALIGNMENT) * ALIGNMENT
    bound = [replace(entry, names=names) for entry, (_, names) in zip(entries, kept, strict=True)]
    return TensorGroup(module_name, location, Unit(name, tuple(entries), offset), Unit(name, tuple(bound), offset))
