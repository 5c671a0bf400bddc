"""What `auto` chooses on real GPUs with ever less memory: never what is then refused, and with the same answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import PartialState

from distiller.errors import UserError
from distiller.teachers import factory, footprint, streamed
from distiller.teachers.device_map import maps
from distiller.teachers.factory import open_teacher, resolve_placement
from distiller.teachers.footprint import measure
from tests.distributed.ranks import on_ranks
from tests.gpu.ranks import NUM_GPUS
from tests.placement_contract import requests_of
from tests.toy_network import ToyNetwork, save_toy, setup

SHARES = (4.0, 1.2, 1.0, 0.9, 0.75, 0.6, 0.4, 0.1, 0.0)
"""Of the teacher's bytes, what each GPU has free."""

pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU")


def choices(weights: Any) -> list[str]:
    """The choice at every share; raises AssertionError where it is refused or answers otherwise than `replicated`."""
    state = PartialState()
    rank, device = state.process_index, str(state.device)
    network, requests = ToyNetwork(weights), requests_of(rank, 1, 1, device)
    whole = open_teacher(network, setup(torch.float32, device))
    expected = [answer["output"].clone() for answer in whole.predict(requests)]
    whole.close()
    total = measure(network, setup()).total
    # Contexts are larger than the toy by orders of magnitude.
    maps.CONTEXT_BYTES = 0
    chosen = []
    for share in SHARES:
        for module in (footprint, maps, streamed):
            module.free_gpu_bytes = lambda _, share=share: int(share * total)  # type: ignore[attr-defined]
        decided = resolve_placement(network, setup(torch.float32, device, placement="auto"))
        teacher = factory.load_teacher(network, decided)
        for mine, theirs in zip(teacher.predict(requests), expected, strict=True):
            assert torch.allclose(mine["output"], theirs, rtol=1e-5, atol=1e-5)
        teacher.close()
        chosen.append(decided.options.placement)
    for module in (footprint, maps, streamed):
        module.free_gpu_bytes = lambda _: int(0.6 * total)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"fit, fastest first: .*cpu"):
        resolve_placement(network, setup(torch.float32, device, placement="replicated"))
    return chosen


@pytest.mark.parametrize("world_size", [n for n in (1, 2) if n <= NUM_GPUS])
def test_auto_runs_whatever_it_chooses(tmp_path, world_size):
    for chosen in on_ranks(world_size, choices, save_toy(tmp_path), timeout_s=240):
        assert chosen[0] == "replicated"
        assert "streamed" in chosen
        assert chosen[-1] == "cpu"
        middle = ("balanced", "streamed") if world_size == 1 else ("streamed", "balanced")
        assert chosen == sorted(chosen, key=("replicated", *middle, "disk", "cpu").index)
