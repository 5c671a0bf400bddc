"""An int8 teacher's error on two ranks: one figure for both, said once, whichever ranks the teacher needs to answer."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from accelerate import PartialState

from distiller.teachers.base import Request
from distiller.teachers.factory import open_teacher
from distiller.teachers.quantization.error import measure_error
from tests.distributed.ranks import on_ranks
from tests.distributed.test_spread import IslandNetwork
from tests.toy_network import DIM, save_toy, setup


def measure(weights: Path) -> list[tuple[float, str]]:
    """(error, what was printed) for each placement."""
    PartialState(cpu=True)
    network, generator, found = IslandNetwork(weights, 2), torch.Generator().manual_seed(0), []
    inputs = torch.randn(6, 1, DIM, generator=generator)
    requests = [Request((i,), {"x": inputs[i]}, ("output",), (int(i > 3),)) for i in range(6)]
    for placement in ("replicated", "balanced"):
        options = setup(quantization="int8", placement=placement)
        teacher, told = open_teacher(network, options), io.StringIO()
        with redirect_stdout(told):
            error = measure_error(network, options, teacher, iter(requests)).relative
        teacher.close()
        found.append((error, told.getvalue()))
    return found


def test_two_ranks_agree_on_one_figure(tmp_path):
    mine, theirs = on_ranks(2, measure, save_toy(tmp_path / "toy"))
    for (error, told), (same, nothing) in zip(mine, theirs, strict=True):
        assert error == same == pytest.approx(mine[0][0], rel=1e-4)
        assert 1e-4 < error < 0.1
        line = f"int8 teacher: its outputs differ from float32's by {error:.1%} (relative, 4 samples)\n"
        assert (told, nothing) == (line, "")
