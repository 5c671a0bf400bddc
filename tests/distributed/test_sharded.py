"""`sharded` beyond the contract: ZeRO-3's answers, what a rank holds while it loads and after, and what is refused."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from accelerate import PartialState, init_empty_weights
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distiller.errors import UserError
from distiller.storage.packaged_files import launch_files_dir
from distiller.storage.swap_folder import LOCK, PREFIX, SwapFolder
from distiller.teachers.base import Call, Network, Outputs, Request
from distiller.teachers.sharded import ShardedTeacher
from distiller.teachers.sharding import zero3
from distiller.teachers.sharding.sharded_modules import storage_bytes
from distiller.teachers.weights.layout import lay_out
from tests.distributed.ranks import on_ranks
from tests.placement_contract import answers, open_case
from tests.toy_network import ToyNetwork, save_toy, setup

RANKS = 2
WIDE = 800
"""WIDE x WIDE is too large for ZeRO-3 to keep whole on every rank, and half of it too large to keep off the disk."""
SLACK_BYTES = 64 * 2**10
"""Activations, alignment and what DeepSpeed keeps for itself; a unit of `WideNetwork` has 40 times as much."""


class WideModel(nn.Module):
    """As large as the shipped thresholds need it; every unit has a parameter and every rank an even share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDE, WIDE, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(WIDE, WIDE, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class WideNetwork(Network):
    """Two modules of the same weights. Request inputs: `x` [B, WIDE] float32. Outputs: `output`, of both."""

    module_names = ("wide", "again")

    def __init__(self, folder: Path) -> None:
        self._folder, self.origin = folder, str(folder)

    def skeleton(self, name: str, dtype: torch.dtype) -> nn.Module:
        with init_empty_weights():
            return WideModel().to(dtype).eval().requires_grad_(False)

    def weight_files(self, name: str) -> list[Path]:
        return [self._folder / "wide.safetensors"]

    def block_names(self, name: str) -> tuple[str, ...]:
        return tuple(f"blocks.{number}" for number in range(6))

    def quantized(self, name: str, dtype: torch.dtype, device_map: Mapping[str, int | str]) -> nn.Module:
        raise AssertionError("not asked for")

    def calls(self, request: Request) -> list[Call]:
        return [Call(name, request.inputs, request.wanted) for name in self.module_names]

    def run(self, module: nn.Module, call: Call) -> Outputs:
        return {"output": module(call.inputs["x"])}

    def merge(self, request: Request, outputs: Any) -> Outputs:
        return {"output": torch.stack([part["output"] for part in outputs])}


class LiveBytes(TorchDispatchMode):
    """Counts the memory of the CPU tensors that were made within it and are alive: now, and at the worst moment."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def now(self) -> int:
        self._alive = {key: item for key, item in self._alive.items() if not item[0].expired()}
        return sum(num_bytes for _, num_bytes in self._alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return result


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(v.shape, generator=generator) / 20 for name, v in WideModel().state_dict().items()}
    save_file(state, folder / "wide.safetensors")
    return folder


@pytest.fixture(scope="module")
def partitioned(tmp_path_factory) -> Path:
    """The packaged files of the teacher's engine, made to partition the toy's small parameters too."""
    folder = tmp_path_factory.mktemp("launch") / "ds_configs"
    folder.mkdir()
    for name in zero3.CONFIG_FILES.values():
        config = json.loads((launch_files_dir() / "ds_configs" / name).read_text())
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        (folder / name).write_text(json.dumps(config))
    return folder.parent


def held(folder: Path, under_deepspeed: bool, offload: str) -> dict[str, Any]:
    """What this rank holds of a `WideNetwork`, by the teacher's word and by the count of living tensors."""
    with LiveBytes() as live:
        teacher = ShardedTeacher(
            WideNetwork(folder), setup(under_deepspeed=under_deepspeed, placement="sharded", offload=offload)
        )
        loaded, peak = live.now(), live.peak
    said = teacher.memory().host_bytes
    outputs = [teacher.predict(REQUESTS)[0]["output"].numpy() for _ in range(3)]
    module = teacher._shards.modules["wide"]
    is_fsdp = isinstance(module, FSDPModule)
    notes = len(module._get_fsdp_state()._comm_ctx.post_forward_order) if is_fsdp else 0
    after = storage_bytes(teacher._shards.tensors(), "cpu")
    del module
    teacher.close()
    return {
        "peak": peak,
        "loaded": loaded,
        "said": said,
        "after": after,
        "closed": live.now(),
        "outputs": outputs,
        "notes": notes,
        "is_fsdp": is_fsdp,
    }


def on_disk(folder: Path, nvme_path: Path) -> dict[str, Any]:
    options = {"placement": "sharded", "offload": "nvme", "nvme_path": str(nvme_path)}
    try:
        teacher = ShardedTeacher(WideNetwork(folder), setup(under_deepspeed=True, **options))
    except UserError as error:
        return {"refused": str(error)}
    outputs = [teacher.predict(REQUESTS)[0]["output"].numpy() for _ in range(3)]
    teacher._ranks.node_barrier()
    teacher.close()
    teacher._ranks.node_barrier()
    left = [file.name for file in nvme_path.rglob("*.swp")]
    return {"outputs": outputs, "left": left}


def zero3_answers(folder: Path, launch_files: Path, offload: str, dtype: str, num_modules: int) -> list[np.ndarray]:
    zero3.launch_files_dir = lambda: launch_files
    ours = setup(getattr(torch, dtype), under_deepspeed=True, placement="sharded", offload=offload)
    teacher = ShardedTeacher(ToyNetwork(folder, num_modules), ours)
    try:
        return answers(teacher, PartialState().process_index, num_modules, num_steps=4)
    finally:
        teacher.close()


def everything(weights: Path, wide: Path, launch_files: Path) -> dict[str, Any]:
    """All that two ranks do here, in one start of theirs: DeepSpeed takes long to import and to set up."""
    PartialState(cpu=True)
    linear = torch.nn.functional.linear
    results: dict[str, Any] = {}
    for name, *arguments in HELD:
        results[name] = _guarded(held, wide, *arguments)
    results["zero3, on disk"] = _guarded(on_disk, wide, launch_files / "nvme")
    for case in ZERO3:
        results[str(case)] = _guarded(zero3_answers, weights, launch_files, *case)
    layer = nn.Linear(4, 4)
    results["undisturbed"] = torch.nn.functional.linear is linear and tuple(layer.weight.shape) == (4, 4)
    return results


def _guarded(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception:
        return traceback.format_exc()


HELD = [("fsdp", False, "none"), ("zero3", True, "none"), ("zero3, offloaded", True, "cpu")]
REQUESTS = [Request((0, 1), {"x": torch.linspace(-1, 1, 2 * WIDE).reshape(2, WIDE)}, ("output",))]
ZERO3 = [(offload, dtype, 2) for offload in ("none", "cpu") for dtype in ("float32", "bfloat16")]
ZERO3 += [("none", "float32", 1)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    return save_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def expected(wide) -> np.ndarray:
    """Both modules' output in one process."""
    module = WideModel()
    module.load_state_dict(load_file(wide / "wide.safetensors"))
    with torch.no_grad():
        output = module(REQUESTS[0].inputs["x"])
    return torch.stack([output, output]).numpy()


@pytest.fixture(scope="module")
def done(weights, wide, partitioned) -> list[dict[str, Any]]:
    pytest.importorskip("deepspeed")
    return on_ranks(RANKS, everything, weights, wide, partitioned, timeout_s=270)


@pytest.mark.parametrize("name", [name for name, *_ in HELD])
def test_a_rank_holds_its_share_and_never_more_than_one_unit_above_it(done, wide, name):
    units = lay_out(WideNetwork(wide).skeleton("wide", torch.float32), WideNetwork(wide).block_names("wide"))
    sizes = 2 * [unit.num_bytes for unit in units]
    for result in (of_rank[name] for of_rank in done):
        assert not isinstance(result, str), result
        assert result["is_fsdp"] == (name == "fsdp")
        assert sum(sizes) / RANKS <= result["loaded"] <= sum(sizes) / RANKS + SLACK_BYTES
        assert result["peak"] <= sum(sizes) / RANKS + max(sizes) + SLACK_BYTES
        assert sum(sizes) / RANKS <= result["after"] <= sum(sizes) / RANKS + SLACK_BYTES
        # On the CPU the shares of all ranks lie in the node's host memory.
        assert sum(sizes) <= result["said"] <= sum(sizes) + RANKS * SLACK_BYTES
        assert result["closed"] <= SLACK_BYTES
        assert result["notes"] == 0


@pytest.mark.parametrize("name", [name for name, *_ in HELD])
def test_repeated_passes_are_equal(done, expected, name):
    for result in (of_rank[name] for of_rank in done):
        for output in result["outputs"]:
            assert np.abs(output - expected).max() <= 1e-6 * np.abs(expected).max()


def test_zero3_reads_what_it_wrote_to_a_disk(done, expected):
    """Without libaio on this machine: that the user hears of it."""
    for result in (of_rank["zero3, on disk"] for of_rank in done):
        assert not isinstance(result, str), result
        if "refused" in result:
            assert "libaio" in result["refused"]
            continue
        for output in result["outputs"]:
            assert np.abs(output - expected).max() <= 1e-6 * np.abs(expected).max()
        assert not result["left"]


@pytest.mark.parametrize("case", ZERO3, ids=str)
def test_zero3_answers_like_replicated(done, weights, case):
    _, dtype, num_modules = case
    for rank, of_rank in enumerate(done):
        ours = of_rank[str(case)]
        assert not isinstance(ours, str), ours
        teacher = open_case("replicated", ToyNetwork(weights, num_modules), getattr(torch, dtype))
        theirs = answers(teacher, rank, num_modules, num_steps=4)
        for mine, reference in zip(ours, theirs, strict=True):
            tolerance = 2e-6 if dtype == "float32" else 2e-2
            assert np.abs(mine - reference).max() <= tolerance * max(1.0, np.abs(reference).max())


def test_deepspeed_for_the_teacher_changes_nothing_for_the_student(done):
    assert all(of_rank["undisturbed"] for of_rank in done)


def test_one_gpu_alone_does_not_offload(tmp_path):
    with pytest.raises(UserError, match=r"teacher\.offload is cpu.*teacher\.placement=streamed"):
        ShardedTeacher(ToyNetwork(tmp_path / "not read"), setup(device="cuda", placement="sharded", offload="cpu"))


def test_a_swap_folder_goes_with_its_run_or_with_the_next(tmp_path):
    abandoned = tmp_path / f"{PREFIX}killed"
    abandoned.mkdir()
    (abandoned / LOCK).touch()
    first, second = SwapFolder(tmp_path), SwapFolder(tmp_path)
    assert not abandoned.exists()
    assert first.path.exists()
    second.remove()
    assert not second.path.exists()
    first.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_swap_folder_that_cannot_be_made_is_the_users_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"teacher\.nvme_path: .*local disk"):
        SwapFolder(tmp_path / "file" / "below")


def test_the_folder_of_another_user_is_left_alone(tmp_path, monkeypatch):
    theirs = SwapFolder(tmp_path)
    monkeypatch.setattr(FileLock, "acquire", Mock(side_effect=[PermissionError(13, "denied"), None]))
    ours = SwapFolder(tmp_path)
    assert theirs.path.is_dir()
    assert ours.path != theirs.path


def test_runs_that_end_and_begin_at_once_do_not_meet(tmp_path):
    """One that ends must not be taken for abandoned while it removes its folder."""

    def use() -> None:
        for _ in range(30):
            folder = SwapFolder(tmp_path)
            for i in range(20):
                (folder.path / str(i)).touch()
            folder.remove()

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(use) for _ in range(4)]:
            done.result()
    assert not list(tmp_path.iterdir())
