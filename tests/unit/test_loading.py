"""Loading: never more than one copy of the teacher in host memory, whatever its place, and the library's weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from huggingface_hub.utils import filter_repo_objects

from distiller.config.teacher import Teacher
from distiller.diffusion.families import find_pipeline
from distiller.diffusion.network import PREDICTION, DiffusionNetwork
from distiller.diffusion.wan.short_text import install_short_text
from distiller.storage.hub import OTHER_FORMS
from distiller.teachers.base import Request
from distiller.teachers.factory import open_teacher
from distiller.teachers.quantization.error import measure_error
from tests import toys
from tests.toy_network import setup

# 44 million parameters: 176 MB in float32, against which imports and threads are small.
LARGE = {"num_attention_heads": 8, "attention_head_dim": 64, "ffn_dim": 2048, "num_layers": 10}
PLACEMENTS = ("replicated", "cpu", "streamed", "disk", "balanced", "rank0", "sharded", "swap")
DTYPES = ("float32", "bfloat16")
MAX_COPIES = 1.3


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    return toys.make_pipeline(tmp_path_factory.mktemp("large") / "pipeline", **LARGE)


def open_network(pipeline: Path) -> DiffusionNetwork:
    return DiffusionNetwork(find_pipeline(Teacher(path=str(pipeline))), 512)


def peak_bytes() -> int:
    """The most memory that this process has had in use since the last reset, shared memory included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def one_request() -> Request:
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "latents": torch.randn(1, 4, 1, 4, 4, generator=generator),
        "timesteps": torch.tensor([500.0]),
        "text": torch.cat([torch.randn(1, 3, 16, generator=generator), torch.zeros(1, 2, 16)], dim=1),
    }
    return Request((0,), inputs, (PREDICTION,))


def report(pipeline: str) -> None:
    """Prints, for each dtype and placement, how many copies of the teacher loading it has taken at its peak."""
    print(json.dumps({dtype: copies(Path(pipeline), dtype) for dtype in DTYPES}))


def copies(pipeline: Path, dtype: str) -> dict[str, float]:
    network, found = open_network(pipeline), {}
    size = sum(parameter.nbytes for parameter in network.skeleton("transformer", getattr(torch, dtype)).parameters())
    open_teacher(network, setup(getattr(torch, dtype))).close()
    for placement in PLACEMENTS:
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_bytes()
        teacher = open_teacher(network, setup(getattr(torch, dtype), placement=placement))
        found[placement] = (peak_bytes() - before) / size
        teacher.close()
    options = setup(getattr(torch, dtype), quantization="int8")
    teacher = open_teacher(network, options)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    measure_error(network, options, teacher, [one_request()])
    found["an int8 teacher's error"] = (peak_bytes() - before) / size
    teacher.close()
    return found


@pytest.fixture(scope="module")
def reported(pipeline) -> dict[str, dict[str, float]]:
    """Measured in a process of its own, where nothing has been freed that loading could take."""
    code = "import sys; from tests.unit.test_loading import report; report(sys.argv[1])"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "0"}
    result = subprocess.run(
        [sys.executable, "-c", code, pipeline], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_teacher_loads_in_little_more_than_its_own_size(reported, dtype):
    """From float32 files, also into bfloat16: then the conversion holds a piece of a tensor, not a second model."""
    taken = reported[dtype]
    print(taken)
    assert {name: value for name, value in taken.items() if value > MAX_COPIES} == {}
    assert taken["disk"] < 0.6
    assert taken["an int8 teacher's error"] < 0.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_and_answers_are_those_of_from_pretrained(pipeline, dtype):
    """Bit for bit, with float32 islands where diffusers keeps them."""
    network = open_network(pipeline)
    theirs = WanTransformer3DModel.from_pretrained(pipeline, subfolder="transformer", torch_dtype=dtype).eval()
    ours = network.skeleton("transformer", dtype)
    held = {name: parameter.dtype for name, parameter in ours.named_parameters()}
    assert held == {name: parameter.dtype for name, parameter in theirs.named_parameters()}
    install_short_text(theirs, 512)
    request = one_request()
    inputs = request.inputs
    teacher = open_teacher(network, setup(dtype))
    answer = teacher.predict([request])[0][PREDICTION]
    with torch.no_grad():
        expected = theirs(
            inputs["latents"].to(dtype), inputs["timesteps"], inputs["text"].to(dtype), return_dict=False
        )[0]
    assert torch.equal(answer, expected)
    teacher.close()


def test_of_a_hub_s_many_weights_the_ones_that_are_read_are_fetched():
    repository = [
        *("unet/config.json", "unet/diffusion_pytorch_model.safetensors", "unet/diffusion_pytorch_model.bin"),
        *("unet/diffusion_pytorch_model.fp16.safetensors", "unet/diffusion_pytorch_model.non_ema.safetensors"),
        *("text_encoder/model.safetensors", "text_encoder/model.fp16-00001-of-00002.safetensors"),
        *("text_encoder/model.safetensors.index.fp16.json", "tokenizer/merges.txt", "tokenizer/spiece.model"),
    ]
    assert list(filter_repo_objects(repository, ignore_patterns=list(OTHER_FORMS))) == [
        *("unet/config.json", "unet/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"),
        *("tokenizer/merges.txt", "tokenizer/spiece.model"),
    ]
