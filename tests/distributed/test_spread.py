"""One copy of the teacher that a node's ranks share: who holds, reads and frees it, and that any map answers alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.storage.weight_files import WeightFiles
from distiller.teachers.base import Call, Outputs
from distiller.teachers.factory import open_teacher
from tests.distributed.ranks import on_ranks
from tests.placement_contract import answers
from tests.toy_network import NUM_BLOCKS, ToyNetwork, save_toy, setup

MAPS: dict[str, dict[str, int | str]] = {
    "all on disk": {"": "disk"},
    "all in host memory": {"": "cpu"},
    "the second rank's": {"": 1},
    "blocks in turn": {"": 0} | {f"blocks.{n}": (0, 1, "cpu", "disk")[n % 4] for n in range(NUM_BLOCKS)},
    "inside a block": {"": 1, "blocks.3.up": 0, "blocks.4.down": "disk", "blocks.5": "cpu", "blocks.5.norm": "disk"},
    "tied weights apart": {"": 1, "embed": 0, "head": "disk", "blocks.0.shared": "cpu", "blocks.1": "disk"},
    "own tensors on disk": {"": "disk", "blocks": 0, "embed": 1},
}
BAD_MAPS = {
    "blocks.0.gain on 1": {"": 0, "blocks.0.gain": 1},
    "at most 1, cpu or disk": {"": 2},
    "says nothing about bias": {"blocks": 0, "embed": 0, "head": 0},
}


class WatchedNetwork(ToyNetwork):
    """Shows the modules that a placement runs."""

    def __init__(self, folder: Path, num_modules: int = 1) -> None:
        super().__init__(folder, num_modules)
        self.modules: dict[str, nn.Module] = {}

    def run(self, module: nn.Module, call: Call) -> Outputs:
        self.modules[call.module] = module
        return super().run(module, call)


class IslandNetwork(ToyNetwork):
    """The toy with its first layer in float32: that one tells which dtype activations have, and is never int8."""

    def skeleton(self, name: str, dtype: torch.dtype) -> nn.Module:
        module = super().skeleton(name, dtype)
        module.embed.float()
        return module


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    return save_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def ran(weights) -> list[dict[str, Any]]:
    """What each of two ranks found; one start for all tests."""
    return on_ranks(2, find_out, weights)


def find_out(weights: Path) -> dict[str, Any]:
    from accelerate import PartialState

    PartialState(cpu=True)
    ranks = Ranks.join(torch.device("cpu"))
    return {
        "maps": answer_by_maps(weights, ranks),
        "copy": share(weights, ranks),
        "int8": answer_in_int8(weights, ranks),
        "refusals": refuse(weights),
    }


def answer_by_maps(weights: Path, ranks: Ranks) -> dict[str, tuple[float, set[str]]]:
    """Of each map: the largest difference to `replicated`, and the devices of the weights while nothing runs."""
    results = {}
    expected = open_teacher(ToyNetwork(weights, 2), setup())
    for name, device_map in MAPS.items():
        network = WatchedNetwork(weights, 2)
        teacher = open_teacher(network, setup(placement="custom", device_map=device_map))
        ours, theirs = (answers(one, ranks.rank, 2) for one in (teacher, expected))
        held = {p.device.type for module in network.modules.values() for p in module.parameters()}
        results[name] = max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)), held
        teacher.close()
    return results


def test_any_map_answers_as_replicated_does(ran):
    for results in (of_rank["maps"] for of_rank in ran):
        assert {name: difference for name, (difference, _) in results.items()} == dict.fromkeys(MAPS, 0.0)
        assert results["all on disk"][1] == {"meta"}
        assert results["all in host memory"][1] == {"cpu"}
        assert results["inside a block"][1] == {"cpu", "meta"}


def share(weights: Path, ranks: Ranks) -> dict[str, Any]:
    """What two ranks see of one copy, which the second one changes."""
    reads, read = [], WeightFiles.read
    WeightFiles.read = lambda self, name, target: (reads.append(name), read(self, name, target))[1]  # type: ignore
    network = WatchedNetwork(weights)
    teacher = open_teacher(network, setup(placement="balanced"))
    memory = teacher.memory()
    before = answers(teacher, 0, 1)
    bias = network.modules["first"].bias
    ranks.node_barrier()
    if ranks.rank == 1:
        bias.fill_(7.0)
    ranks.node_barrier()
    seen, after = bias.tolist(), answers(teacher, 0, 1)
    ranks.node_barrier()
    WeightFiles.read = read
    maps = Path("/proc/self/maps")
    mapped = "distiller-teacher" in maps.read_text()
    del bias
    teacher.close()
    return {
        "reads": len(reads),
        "host_bytes": memory.host_bytes,
        "seen": set(seen),
        "changed": float(np.abs(before[0] - after[0]).max()),
        "mapped": (mapped, "distiller-teacher" in maps.read_text()),
        "after": teacher.memory().host_bytes,
    }


def test_there_is_one_copy_and_one_reader(weights, ran):
    first, second = (of_rank["copy"] for of_rank in ran)
    assert first["reads"] > NUM_BLOCKS
    assert second["reads"] == 0
    for seen in (first, second):
        assert seen["seen"] == {7.0}
        assert seen["changed"] > 1
        assert seen["mapped"] == (True, False)
        assert seen["after"] == 0
    assert first["host_bytes"] == second["host_bytes"]
    assert first["host_bytes"] < 1.2 * (weights / "first.safetensors").stat().st_size


def answer_in_int8(weights: Path, ranks: Ranks) -> dict[str, Any]:
    """How far int8 answers are from the floats', from each other, and the bytes of both."""
    network, flat, num_bytes = IslandNetwork(weights, 2), {}, {}
    for name, quantization in (("replicated", "none"), ("replicated", "int8"), ("balanced", "int8")):
        teacher = open_teacher(network, setup(placement=name, quantization=quantization))
        flat[name, quantization] = np.concatenate(answers(teacher, ranks.rank, 2))
        num_bytes[name, quantization] = teacher.memory().host_bytes
        teacher.close()
    floats, replicated, balanced = flat.values()
    return {
        "error": np.linalg.norm(replicated - floats) / np.linalg.norm(floats),
        "difference": np.abs(replicated - balanced).max(),
        "copies": num_bytes["replicated", "int8"] / num_bytes["balanced", "int8"],
    }


def test_int8_answers_alike_from_one_copy_or_two(ran):
    for seen in (of_rank["int8"] for of_rank in ran):
        assert 0 < seen["error"] < 0.05
        assert seen["difference"] == 0
        assert seen["copies"] > 1.5


def refuse(weights: Path) -> list[str]:
    """What each bad map is answered with; all ranks must hear it, and go on."""
    said = []
    for device_map in BAD_MAPS.values():
        with pytest.raises(UserError) as error:
            open_teacher(ToyNetwork(weights, 2), setup(placement="custom", device_map=device_map))
        said.append(str(error.value))
    return said


def test_bad_maps_are_refused_on_every_rank(ran):
    for said in (of_rank["refusals"] for of_rank in ran):
        for part, text in zip(BAD_MAPS, said, strict=True):
            assert part in text
            assert text.startswith("teacher.device_map")
            assert "\n" not in text
