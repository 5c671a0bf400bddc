"""Every placement holds the picture families' networks: text beside picture from block to block, and skips over blocks.

A UNet's blocks on the way up read what blocks on the way down left: over devices, rings and shards it must still be
theirs.
"""

from __future__ import annotations

import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distiller.config.placements import PLACEMENTS
from distiller.config.teacher import Teacher as TeacherOptions
from distiller.data import rng
from distiller.diffusion.families import find_pipeline
from distiller.diffusion.network import DiffusionNetwork
from distiller.distributed.devices import set_tf32
from distiller.teachers.base import Request
from distiller.teachers.factory import open_teacher
from tests import toy_pictures
from tests.cached_cases import FromFiles
from tests.distributed.ranks import on_ranks
from tests.toy_network import setup

pytestmark = [pytest.mark.timeout(500), pytest.mark.slow]
CASES: dict[str, dict[str, Any]] = {name: {} for name in PLACEMENTS} | {
    "custom": {"device_map": {"": 0}},
    "streamed, two buffers": {"ring_blocks": 2},
    "streamed, shared transfers": {"shard_transfers": True},
    "streamed, each call by itself": {"amortise": False},
    "streamed, all resident": {"resident_blocks": 9},
    "sharded, offloaded": {"offload": "cpu"},
    "rank0, micro-batches of two": {"micro_batch": 2},
}
SPREAD = {
    "sd3": {"": 0, "transformer_blocks.0": 1, "transformer_blocks.1": "cpu", "transformer_blocks.2": "disk"},
    "sd": {"": 0, "down_blocks.1": 1, "mid_block": "cpu", "up_blocks.0": "disk", "up_blocks.1": 1},
}
"""Of the case `custom, spread`."""


def network_of(kind: str, folder: Path) -> DiffusionNetwork:
    return DiffusionNetwork(find_pipeline(TeacherOptions(path=str(folder / kind))), 5)


def requests_of(kind: str, rank: int, features: tuple[str, ...]) -> list[Request]:
    """Two micro-batches of uneven sizes, guided."""
    requests = []
    for number, size in enumerate((3 + rank, 2)):
        ids = tuple(100 * rank + 10 * number + place for place in range(size))
        rows, width = (13, toy_pictures.T5_WIDTH) if kind == "sd3" else (8, toy_pictures.CLIP_WIDTH)
        inputs = {
            "latents": torch.stack([rng.noise(0, 0, i, (4, 1, 4, 4)) for i in ids]),
            "timesteps": torch.tensor([1000 * rng.uniform(0, 0, i, "t") for i in ids]),
            "text": torch.stack([rng.noise(1, 0, i, (rows, width)) for i in ids]),
        }
        if kind == "sd3":
            inputs["pooled"] = torch.stack([rng.noise(2, 0, i, (toy_pictures.POOLED_WIDTH,)) for i in ids])
        inputs |= {f"negative_{name}": inputs[name].flip(0) for name in ("text", "pooled") if name in inputs}
        requests.append(Request(ids, inputs, ("prediction", "unconditional", *features)))
    return requests


def answers(
    kind: str,
    folder: Path,
    rank: int,
    case: str,
    options: dict[str, Any],
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[np.ndarray]:
    """All outputs of two steps."""
    network, placement = network_of(kind, folder), case.partition(",")[0]
    if placement == "cached":
        asked = setup(dtype, device, placement="replicated")
        teacher: Any = FromFiles(open_teacher(network, asked), network, asked)
    else:
        teacher = open_teacher(network, setup(dtype, device, placement=placement, **options))
    names = network.block_names(network.module_names[0])
    features = tuple(f"features/{number}" for number in (0, len(names) - 1))
    try:
        return [
            np.concatenate([outputs[name].float().flatten().cpu().numpy() for name in sorted(outputs)])
            for _ in range(2)
            for outputs in teacher.predict([on_device(each, device) for each in requests_of(kind, rank, features)])
        ]
    finally:
        teacher.close()


def on_device(request: Request, device: str) -> Request:
    return replace(request, inputs={name: value.to(device) for name, value in request.inputs.items()})


def cases_of(kind: str) -> dict[str, dict[str, Any]]:
    return CASES | {"custom, spread": {"device_map": SPREAD[kind]}}


def answers_of_all(folder: Path, on_gpu: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """On this rank, or the traceback of what went wrong."""
    from accelerate import PartialState

    set_tf32(False)
    state, results = PartialState(cpu=not on_gpu), {}
    rank, device = state.process_index, str(state.device) if on_gpu else "cpu"
    for kind in toy_pictures.KINDS:
        for case, options in cases_of(kind).items():
            try:
                results[kind, case] = answers(kind, folder, rank, case, options, device, dtype)
            except Exception:
                results[kind, case] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for kind in toy_pictures.KINDS:
        toy_pictures.make(kind, folder / kind)
    return folder


@pytest.fixture(scope="module")
def answered(folder) -> list[dict[str, Any]]:
    """What each of two ranks answered; all cases share one start of them."""
    return on_ranks(2, answers_of_all, folder, timeout_s=400)


@pytest.mark.parametrize("kind", toy_pictures.KINDS)
@pytest.mark.parametrize("case", [*CASES, "custom, spread"])
def test_answers_equal_those_of_replicated(answered, folder, kind, case):
    for rank, results in enumerate(answered):
        assert not isinstance(results[kind, case], str), f"rank {rank}:\n{results[kind, case]}"
        expected = answers(kind, folder, rank, "replicated", {})
        for ours, theirs in zip(results[kind, case], expected, strict=True):
            assert np.abs(ours - theirs).max() <= 5e-6 * max(1.0, np.abs(theirs).max())
