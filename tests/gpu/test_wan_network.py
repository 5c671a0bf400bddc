"""Routing samples to two experts without stalling a GPU: run by hand, `python -m pytest tests/gpu -s`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from distiller.config.recipe import Teacher
from distiller.diffusion.families import find_pipeline
from distiller.diffusion.network import DiffusionNetwork
from distiller.teachers import Request
from tests import toys
from tests.gpu.ranks import NUM_GPUS
from tests.unit.test_wan_network import inputs_for

pytestmark = [
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def network(tmp_path) -> DiffusionNetwork:
    return DiffusionNetwork(find_pipeline(Teacher(path=str(toys.make_pipeline(tmp_path / "pipeline", 2)))), 512)


@pytest.fixture
def request_of_both() -> Request:
    inputs = {name: value.cuda() for name, value in inputs_for(5).items()}
    return Request(tuple(range(5)), inputs, ("prediction", "unconditional"), (1, 0, 1, 0, 0))


def test_experts_get_their_samples_without_the_host_waiting(network, request_of_both, waiting_is_an_error):
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.tensor([1], device="cuda")
    calls = network.calls(request_of_both)
    outputs = [{call.wanted[0]: call.inputs["latents"]} for call in calls]
    merged = network.merge(request_of_both, outputs)
    torch.cuda.set_sync_debug_mode("default")
    assert [len(call.inputs["text"]) for call in calls] == [3, 3, 2, 2]
    for name in ("prediction", "unconditional"):
        assert torch.equal(merged[name], request_of_both.inputs["latents"])
