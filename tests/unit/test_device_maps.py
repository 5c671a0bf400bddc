"""Which part of a teacher goes where, and what moves in a forward pass: on GPUs that only torch's fake tensors know."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.utils import compute_module_sizes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.teachers.device_map import maps
from distiller.teachers.device_map.device_hooks import DeviceCopies, attach_hooks
from distiller.teachers.device_map.maps import DeviceMap, balanced_map, check_custom_map, sequential_map
from distiller.teachers.device_map.module_partition import (
    onloaded_group,
    partition_module,
    resident_groups,
    separate_shared_names,
)
from distiller.teachers.device_map.teacher import pack
from distiller.teachers.weights.layout import Unit, lay_out
from distiller.teachers.weights.loading import ModulePlan
from tests.toy_network import DIM, NUM_BLOCKS, ToyNetwork, setup

NETWORK = ToyNetwork(Path("nowhere"))
CALLER = torch.device("cuda", 1)


def plan_of(dtype: torch.dtype = torch.float32) -> ModulePlan:
    module = NETWORK.skeleton("first", dtype)
    plan = ModulePlan("first", module, lay_out(module, NETWORK.block_names("first")), None)
    separate_shared_names(plan)
    return plan


def bytes_on_devices(plan: ModulePlan, device_map: DeviceMap) -> dict[int | str, int]:
    sizes: dict[int | str, int] = {}
    for group in resident_groups(plan, device_map, lambda _: True):
        sizes[group.location] = sizes.get(group.location, 0) + group.stored.num_bytes
    return sizes


BLOCK_BYTES = {unit.name: unit.num_bytes for unit in plan_of().units}["blocks.0"]


@pytest.mark.parametrize("make_map", [balanced_map, sequential_map])
def test_blocks_stay_whole_and_two_modules_share_the_budgets(make_map):
    plans = [plan_of(), replace(plan_of(), name="second")]
    total = sum(unit.num_bytes for unit in plans[0].units)
    budgets = {0: total, 1: 2 * total, 2: total}
    packing = pack(plans, make_map, budgets, allows_disk=False)
    assert packing.fits
    maps = packing.maps
    used = [bytes_on_devices(plan, device_map) for plan, device_map in zip(plans, maps, strict=True)]
    assert all(sum(of_plan.get(device, 0) for of_plan in used) <= budgets[device] for device in budgets)
    assert maps[0] != maps[1] or make_map is balanced_map
    for plan, device_map in zip(plans, maps, strict=True):
        assert not [p.path for p in partition_module(plan, device_map, lambda _: True) if p.path.count(".") > 1]


def test_balanced_uses_all_devices_and_sequential_the_first_ones():
    plan, blocks, budgets = plan_of(), NETWORK.block_names("first"), dict.fromkeys(range(3), 10**9)
    assert set(bytes_on_devices(plan, balanced_map(plan.module, blocks, budgets))) == {0, 1, 2}
    assert set(bytes_on_devices(plan, sequential_map(plan.module, blocks, budgets))) == {0}
    few = sequential_map(plan.module, blocks, {0: 5 * BLOCK_BYTES, 1: 10**9, 2: 10**9})
    assert set(bytes_on_devices(plan, few)) == {0, 1}


def test_float32_islands_count_as_such():
    """Accelerate sees the size of every block as it is held: were their norms in bfloat16, each would be smaller."""
    plan = plan_of(torch.bfloat16)
    sizes = compute_module_sizes(plan.module)
    entries = {unit.name: unit.entries for unit in plan.units}
    shared = 2 * (DIM * DIM + DIM)
    assert sizes["blocks.6"] - shared == sum(entry.num_bytes for entry in entries["blocks.6"])
    assert sizes["blocks.6.norm"] == 2 * DIM * 4


@pytest.mark.parametrize("make_map", [balanced_map, sequential_map])
def test_what_fits_on_no_device_is_refused_with_what_would_fit(make_map):
    budgets = {0: 3 * BLOCK_BYTES, 1: 3 * BLOCK_BYTES}
    packing = pack([plan_of()], make_map, budgets, allows_disk=False)
    assert not packing.fits
    with pytest.raises(UserError, match=r"balanced needs .*without a place: .* have 0: 0\.00 GiB, .*; choose another$"):
        packing.check("balanced", "choose another")
    crowded = pack([plan_of()], lambda *_: {"": "disk", "blocks": 1}, budgets, allows_disk=True)
    assert not crowded.fits
    with pytest.raises(UserError, match=r"custom needs .*; these fit$"):
        crowded.check("custom", "these fit")
    from_disk = pack([plan_of()], lambda *_: {"": "disk"}, budgets, allows_disk=True)
    assert from_disk.fits
    assert from_disk.maps == [{"": "disk"}]
    from_disk.check("custom", "these fit")


def test_a_gpu_keeps_memory_for_the_student_contexts_and_activations(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(maps, "free_gpu_bytes", lambda device: (70 if device.index < 2 else 5) * 2**30)
    ranks = Ranks(torch.device("cuda", 0), 0, 2, 0, 2, None, None)
    run = replace(setup(), ranks=ranks, reserved_bytes=10 * 2**30)
    budgets = maps.budgets_of_devices(run, gpus_of_ranks=[0, 2])
    contexts = 2 * maps.CONTEXT_BYTES
    assert budgets == {0: (63 - 10) * 2**30 - contexts, 1: 63 * 2**30 - contexts, 2: 0}
    alone = replace(run, reserved_bytes=0)
    assert maps.budgets_of_devices(alone, [0, 2], kept_share=0.2)[0] == 56 * 2**30 - contexts
    # An update that takes less than a tenth is all that is kept, with a margin of 7%.
    known = replace(alone, update_bytes=2**30)
    assert maps.budgets_of_devices(known, [0, 2])[1] == pytest.approx((70 * 0.93 - 1) * 2**30 - contexts, abs=8)


@pytest.mark.parametrize(
    ("device_map", "said"),
    [
        ({"": 0, "blocks.33": 1}, r"'blocks\.33' is no part of the teacher; did you mean 'blocks\.3'\?"),
        ({"": 0, "head": 2}, "'head' is on 2, and this node has 2 .* at most 1, cpu or disk"),
        ({"blocks": 0, "embed": 1, "head": 1}, "says nothing about bias; add"),
        ({"blocks.0": 0, "embed": "cpu", "bias": 0}, r"says nothing about blocks\.1\.gain and .* other tensors"),
    ],
)
def test_a_custom_map_must_cover_what_there_is(device_map, said):
    with pytest.raises(UserError, match=said):
        check_custom_map(device_map, [plan_of().module], num_devices=2)


def test_a_complete_custom_map_is_taken():
    module = plan_of().module
    check_custom_map({"": "disk"}, [module], 1)
    check_custom_map({"blocks": 1, "embed": "cpu", "head.weight": 0, "bias": "disk", "positions": 0}, [module], 2)


def test_a_modules_own_tensors_have_one_location():
    device_map: DeviceMap = {"": 0, "blocks.2.gain": 1}
    with pytest.raises(UserError, match=r"blocks\.2 uses its own tensors in one place; not blocks\.2\.gain on 1, "):
        partition_module(plan_of(), device_map, lambda _: True)


class Moves(TorchDispatchMode):
    """Collects copies from one device to another: (elements, from, to)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int | None, int | None]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].device != output.device:
            self.seen.append((output.numel(), args[0].device.index, output.device.index))
        return output


def put(module: nn.Module, unit: Unit, device: torch.device) -> None:
    """Fake weights. Not through a flat buffer: slicing one needs a CUDA build of torch."""
    for entry in unit.entries:
        value = torch.empty(entry.shape, dtype=entry.dtype, device=device)
        for name in entry.names:
            owner, _, attribute = name.rpartition(".")
            holder = module.get_submodule(owner)
            if entry.is_parameter:
                holder._parameters[attribute] = nn.Parameter(value, requires_grad=False)
            else:
                holder._buffers[attribute] = value


class FakeWeights:
    """Weights that are on the caller's GPU only while their module runs."""

    def __init__(self, module: nn.Module, unit: Unit) -> None:
        self.module, self.unit = module, unit

    def onload(self) -> None:
        put(self.module, self.unit, CALLER)

    def offload(self) -> None:
        put(self.module, self.unit, torch.device("meta"))


def forward(device_map: DeviceMap) -> tuple[torch.device, list[tuple[int, int | None, int | None]]]:
    """The device of GPU 1's answer, and what was copied. An operation on tensors of two devices is an error."""
    plan = plan_of(torch.bfloat16)

    def is_resident(location):
        return isinstance(location, int)

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        plan.module._buffers["positions"] = mode.from_tensor(plan.module._buffers["positions"])
        for group in resident_groups(plan, device_map, is_resident):
            put(plan.module, group.bound, torch.device("cuda", group.location))
        partitions = partition_module(plan, device_map, is_resident)
        onloaded = {
            partition.path: FakeWeights(plan.module, onloaded_group(plan, partition).bound)
            for partition in partitions
            if partition.names and not is_resident(partition.location)
        }
        device_of = lambda location: torch.device("cuda", location) if is_resident(location) else CALLER  # noqa: E731
        attach_hooks(plan.module, partitions, device_of, onloaded, DeviceCopies())  # type: ignore[arg-type]
        x = torch.empty(4, DIM, dtype=torch.bfloat16, device=CALLER)
        with torch.no_grad(), Moves() as moves:
            return plan.module(x, 0).device, moves.seen


def test_activations_cross_each_boundary_once():
    device, moves = forward(
        balanced_map(plan_of().module, NETWORK.block_names("first"), dict.fromkeys(range(3), 10**9))
    )
    assert device.index == 0
    assert moves == [(4 * DIM, 1, 0), (4 * DIM, 0, 1), (4 * DIM, 1, 2), (4 * DIM, 2, 0)]


@pytest.mark.parametrize(
    "device_map",
    [
        {"": 0},
        {"": "cpu"},
        {"": "disk", "blocks.3": 2},
        {"": 0, "blocks": 2},
        {"": 0, "blocks": "cpu"},
        {"": 2, "embed": 1, "head": 0, "blocks.0": "cpu", "blocks.1": 0, "blocks.4.up": 1, "blocks.4.norm": "disk"},
        {f"blocks.{number}": number % 3 for number in range(NUM_BLOCKS)} | {"": 1, "head": 2},
    ],
)
def test_every_operation_finds_its_tensors_on_one_device(device_map):
    """The teacher's tied weights and shared layer are on several devices here."""
    forward(device_map)


def test_what_several_blocks_get_is_copied_once():
    copies, text, device = DeviceCopies(), torch.zeros(3), torch.device("meta")
    (first,), named = copies.copy_to((text,), device), copies.copy_to({"text": [text, 1]}, device)
    assert first.device == device
    assert named["text"][0] is first
    assert named["text"][1] == 1
    assert copies.copy_to(text, torch.device("cpu")) is text
    text += 1
    again = copies.copy_to(text, device)
    assert again is not first
    again += 1
    assert copies.copy_to(text, device) is not again


def test_a_copy_goes_with_its_original():
    copies, original = DeviceCopies(), torch.zeros(3)
    copy = weakref.ref(copies.copy_to(original, torch.device("meta")))
    assert copy() is not None
    del original
    assert copy() is None


class Listed(nn.Module):
    """Its forward pass uses tensors out of a list, beside a block with a forward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ParameterList([torch.zeros(2), torch.zeros(2)])
        self.tables = nn.ModuleDict({"first": nn.ModuleList([nn.Linear(2, 2)])})


def test_hooks_are_on_modules_that_run_and_lists_belong_to_what_contains_them():
    module = Listed()
    plan = ModulePlan("listed", module, lay_out(module, ()), None)
    located = {
        partition.path: (partition.names, partition.location)
        for partition in partition_module(plan, {"": 0, "tables": 1}, lambda _: True)
    }
    weights = ("tables.first.0.weight", "tables.first.0.bias")
    assert located == {"": (("own.0", "own.1"), 0), "tables.first.0": (weights, 1)}
    with pytest.raises(UserError, match=r"the teacher uses its own tensors in one place; not own\.0 on 0, own\.1 on 1"):
        partition_module(plan, {"": 0, "own.1": 1}, lambda _: True)


def test_a_partition_knows_where_its_outputs_go():
    device_map: DeviceMap = {"": 0, "blocks.6": 1, "head": 1}
    partitions = {partition.path: partition for partition in partition_module(plan_of(), device_map, lambda _: True)}
    assert replace(partitions["head"], names=()) == replace(partitions["head"], names=(), location=1, output_location=0)
    assert partitions["blocks.6"].output_location is None
