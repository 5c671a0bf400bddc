"""Every placement holds a real classifier: convolutions with running statistics, layers in stages, renamed weights."""

from __future__ import annotations

import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distiller.config.placements import PLACEMENTS
from distiller.data import rng
from distiller.teachers.base import Request
from distiller.teachers.factory import open_teacher
from distiller.vision.converted import converted_files
from distiller.vision.files import Processor, find_classifier
from distiller.vision.network import ClassifierNetwork
from tests import classifiers
from tests.distributed.ranks import on_ranks
from tests.toy_network import setup

pytestmark = [pytest.mark.timeout(500), pytest.mark.slow]
# A cached teacher has no network to hold.
CASES: dict[str, dict[str, Any]] = {name: {} for name in PLACEMENTS if name != "cached"} | {
    "custom": {"device_map": {"": 0}},
    "streamed, shared transfers": {"shard_transfers": True},
    "streamed, all resident": {"resident_blocks": 9},
    "sharded, offloaded": {"offload": "cpu"},
}
KINDS = ("resnet", "resnet, one unit", "resnet, channels last", "vit")


def network_of(kind: str, folder: Path) -> ClassifierNetwork:
    """`one unit` is what a model is whose layers cannot be told apart."""
    root = folder / kind.partition(",")[0]
    files = find_classifier(str(root), None, None, Processor(root, 3, "teacher"))
    structure = replace(files.structure, block_names=()) if "one unit" in kind else files.structure
    names = lambda wanted: converted_files(files, wanted, folder / "stages")  # noqa: E731
    return ClassifierNetwork(files.config, structure, files.source, names)


def answers(network: ClassifierNetwork, kind: str, rank: int, dtype: str, **options: Any) -> list[np.ndarray]:
    """All outputs for two micro-batches of uneven sizes."""
    memory = torch.channels_last if "channels last" in kind else torch.contiguous_format
    teacher = open_teacher(network, setup(getattr(torch, dtype), **options))
    try:
        requests = []
        for number, size in enumerate((3 + rank, 2)):
            ids = tuple(100 * rank + 10 * number + place for place in range(size))
            pixels = torch.stack([rng.noise(0, 0, i, (3, 32, 32)) for i in ids]).to(memory_format=memory)
            features = ("features/0", "features/3") if network.block_names("classifier") else ()
            requests.append(Request(ids, {"pixels": pixels}, ("logits", *features)))
        return [
            np.concatenate([outputs[name].float().flatten().numpy() for name in sorted(outputs)])
            for _ in range(2)
            for outputs in teacher.predict(requests)
        ]
    finally:
        teacher.close()


def answers_of_all(folder: Path) -> dict[str, Any]:
    """On this rank, or the traceback of what went wrong."""
    from accelerate import PartialState

    rank, results = PartialState(cpu=True).process_index, {}
    for kind in KINDS:
        for case, options in CASES.items():
            try:
                network = network_of(kind, folder)
                results[kind, case] = answers(
                    network, kind, rank, "float32", placement=case.partition(",")[0], **options
                )
            except Exception:
                results[kind, case] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("classifiers")
    classifiers.save_classifier(folder / "resnet", classifiers.resnet_config())
    classifiers.save_classifier(folder / "vit", classifiers.vit_config())
    return folder


@pytest.fixture(scope="module")
def answered(folder) -> list[dict[str, Any]]:
    """What each of two ranks answered; all cases share one start of them."""
    return on_ranks(2, answers_of_all, folder, timeout_s=400)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_answers_equal_those_of_replicated(answered, folder, kind, case):
    for rank, results in enumerate(answered):
        assert not isinstance(results[kind, case], str), f"rank {rank}:\n{results[kind, case]}"
        expected = answers(network_of(kind, folder), kind, rank, "float32", placement="replicated")
        for ours, theirs in zip(results[kind, case], expected, strict=True):
            assert np.abs(ours - theirs).max() <= 5e-6 * max(1.0, np.abs(theirs).max())
