"""Stable Diffusion on GPUs, in every place: run by hand, `python -m pytest tests/gpu/test_pictures.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distiller.config.teacher import Teacher
from distiller.diffusion.families import find_pipeline
from distiller.diffusion.network import DiffusionNetwork
from distiller.diffusion.sampling import draw, guided_predictor
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.diffusion.text import embed
from distiller.teachers.factory import open_teacher
from tests import toy_pictures
from tests.distributed.ranks import on_ranks
from tests.distributed.test_picture_placements import CASES, answers_of_all
from tests.gpu.ranks import NUM_GPUS
from tests.toy_network import setup

pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU")
# As in test_placements.py: another batch size and the CPU are other kernels.
LOOSE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for kind in toy_pictures.KINDS:
        toy_pictures.make(kind, folder / kind)
    return folder


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def answered(folder, request) -> tuple[torch.dtype, list[dict[str, Any]]]:
    return request.param, on_ranks(min(2, NUM_GPUS), answers_of_all, folder, True, request.param, timeout_s=280)


@pytest.mark.parametrize("kind", toy_pictures.KINDS)
@pytest.mark.parametrize("case", [*CASES, "custom, spread"])
def test_answers_equal_those_of_replicated(answered, kind, case):
    if case in ("custom, spread", "sharded, offloaded") and NUM_GPUS < 2:
        pytest.skip("needs two GPUs")
    dtype, ranks = answered
    loose = case.startswith(("rank0", "cpu", "custom, spread"))
    for rank, results in enumerate(ranks):
        assert not isinstance(results[kind, case], str), f"rank {rank}:\n{results[kind, case]}"
        for ours, theirs in zip(results[kind, case], results[kind, "replicated"], strict=True):
            assert np.abs(ours - theirs).max() <= (LOOSE[dtype] if loose else 0) * max(1.0, np.abs(theirs).max())


@pytest.mark.parametrize("kind", toy_pictures.KINDS)
def test_a_16_bit_teacher_draws_a_picture(folder, kind):
    device = torch.device("cuda:0")
    family = find_pipeline(Teacher(path=str(folder / kind)))
    network = DiffusionNetwork(family, 5)
    teacher = open_teacher(network, setup(torch.bfloat16, "cuda:0"))
    encoder = family.load_text_encoder(torch.bfloat16, device)
    positive, negative = embed(family, encoder, ["a red cat", "a bird"], 5), embed(family, encoder, [""], 5)
    sampling_inputs = SamplingInputs.make(0, "noise", (0, 1), (4, 1, 4, 4), positive, negative, device)
    predict = guided_predictor(teacher, network, (0, 1), sampling_inputs, (3.0, 3.0))
    latents = draw(predict, family.noise_process((4, 1, 4, 4)), sampling_inputs, 5).latents
    assert latents.dtype == torch.float32
    assert family.load_vae(device).decode(latents).shape == (2, 1, 32, 32, 3)
