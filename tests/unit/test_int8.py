"""int8 teachers: bitsandbytes' arithmetic, diffusers' choice of layers, and answers close to those of floats."""

from __future__ import annotations

from pathlib import Path

import bitsandbytes
import pytest
import torch
from diffusers import BitsAndBytesConfig, WanTransformer3DModel
from diffusers.quantizers.bitsandbytes.utils import replace_with_bnb_linear
from torch import nn

from distiller.config.teacher import Teacher
from distiller.diffusion.families import find_pipeline
from distiller.diffusion.network import DiffusionNetwork
from distiller.errors import UserError
from distiller.teachers import Outputs, Request, rules
from distiller.teachers.base import Call
from distiller.teachers.factory import open_teacher
from distiller.teachers.quantization_error import _errors as relative_errors
from distiller.teachers.quantization_error import measure_error
from distiller.teachers.weights.int8 import OUTLIER_THRESHOLD, Int8Linear, quantize
from distiller.teachers.weights.quantized import convert_linears, plan_quantized_modules
from tests import toys
from tests.toy_network import setup
from tests.unit.test_wan_network import inputs_for


class WatchedNetwork(DiffusionNetwork):
    """Shows the modules that a placement runs."""

    def __init__(self, path: Path) -> None:
        super().__init__(find_pipeline(Teacher(path=str(path))), 512)
        self.modules: dict[str, nn.Module] = {}

    def run(self, module: nn.Module, call: Call) -> Outputs:
        self.modules[call.module] = module
        return super().run(module, call)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    """Wide enough that weights, not their alignment, take the memory."""
    sizes = {"num_heads": 4, "attention_head_dim": 32, "ffn_dim": 256}
    return toys.make_pipeline(tmp_path_factory.mktemp("int8") / "pipeline", 2, **sizes)


def answers(
    network: DiffusionNetwork, dtype: torch.dtype = torch.bfloat16, **options
) -> tuple[list[torch.Tensor], int]:
    """Outputs of three samples of which each expert gets some, and the teacher's bytes."""
    request = Request((0, 1, 2), inputs_for(3), ("prediction", "unconditional", "features/1"), (1, 0, 1))
    teacher = open_teacher(network, setup(dtype, **options))
    memory = teacher.memory()
    outputs = teacher.predict([request])[0]
    teacher.close()
    return [outputs[name].float() for name in sorted(outputs)], memory.host_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_computes_what_bitsandbytes_own_does(dtype):
    torch.manual_seed(0)
    linear, x = nn.Linear(48, 40).to(dtype), torch.randn(3, 7, 48).to(dtype)
    x[1, 2, 5] = 9
    theirs = bitsandbytes.nn.Linear8bitLt(48, 40, has_fp16_weights=False, threshold=OUTLIER_THRESHOLD)
    theirs.load_state_dict(linear.state_dict())
    theirs = theirs.to("cpu").eval()
    weight, scales = quantize(linear.weight.detach())
    assert (weight.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (40,))
    ours = Int8Linear(nn.Parameter(weight, requires_grad=False), scales, linear.bias)
    with torch.no_grad():
        output = ours(x)
        assert output.dtype == dtype
        assert torch.equal(output, theirs(x))
        assert (output - linear(x)).norm() < 0.02 * linear(x).norm()
        assert torch.equal(ours(x[None, None]), output[None, None])


def test_diffusers_would_convert_the_same_layers(pipeline):
    network = WatchedNetwork(pipeline)
    plan = plan_quantized_modules(network, setup(torch.bfloat16, quantization="int8"), is_reader=False)[0]
    ours = {name for name, module in plan.module.named_modules() if isinstance(module, Int8Linear)}
    theirs = network.skeleton("transformer", torch.bfloat16)
    kept = list(WanTransformer3DModel._keep_in_fp32_modules or ())
    replace_with_bnb_linear(theirs, kept, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    assert ours == {n for n, module in theirs.named_modules() if isinstance(module, bitsandbytes.nn.Linear8bitLt)}
    assert "blocks.0.ffn.net.2" in ours
    assert not [name for name in ours if "time_embedder" in name]


def test_shared_layers_stay_shared_and_embeddings_stay_floats():
    with torch.device("meta"):
        module = nn.Module()
        module.embed, module.head, module.first = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False), nn.Linear(4, 4)
        module.head.weight, module.second, module.third = module.embed.weight, module.first, nn.Linear(4, 4)
        module.third.weight = module.first.weight
    assert convert_linears(module, ()) == {"first.weight", "second.weight", "third.weight"}
    assert module.second is module.first
    assert module.third.weight is module.first.weight
    assert module.third.weight_scales is module.first.weight_scales
    assert isinstance(module.head, nn.Linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_answers_are_close_to_the_floats(pipeline, dtype):
    network = WatchedNetwork(pipeline)
    floats, _ = answers(network, dtype)
    outputs, _ = answers(network, dtype, quantization="int8")
    for ours, theirs in zip(outputs, floats, strict=True):
        assert 0 < (ours - theirs).norm() < 0.03 * theirs.norm()
    spread, _ = answers(network, dtype, quantization="int8", placement="balanced")
    assert all(torch.equal(a, b) for a, b in zip(outputs, spread, strict=True))


def test_a_weight_takes_half_of_its_bytes_in_bfloat16(pipeline):
    network = WatchedNetwork(pipeline)
    _, whole = answers(network)
    layer = network.modules["transformer"].blocks[0].ffn.net[2].weight
    _, held = answers(network, quantization="int8")
    quantized_layer = network.modules["transformer"].blocks[0].ffn.net[2].weight
    assert quantized_layer.dtype == torch.int8
    assert quantized_layer.nbytes * 2 == layer.nbytes
    assert held < 0.62 * whole
    islands = network.modules["transformer"].condition_embedder.time_embedder.linear_1.weight
    assert islands.dtype == torch.float32


def requests_of_one(count: int = 5) -> list[Request]:
    inputs = inputs_for(count)
    return [
        Request((i,), {k: v[i : i + 1] for k, v in inputs.items()}, ("prediction", "features/1"), (i % 2,))
        for i in range(count)
    ]


@pytest.mark.parametrize("placement", ["replicated", "balanced"])
def test_its_error_is_that_of_the_whole_teachers_answers(pipeline, placement, capsys):
    network, asked = WatchedNetwork(pipeline), requests_of_one()
    whole = open_teacher(network, setup(torch.bfloat16)).predict(asked[:4])
    options = setup(torch.bfloat16, quantization="int8", placement=placement)
    teacher = open_teacher(network, options)
    outputs = teacher.predict(asked[:4])
    error = measure_error(network, options, teacher, iter(asked))
    teacher.close()
    expected = {}
    for name in ("prediction", "features/1"):
        ours, theirs = (torch.cat([one[name].double() for one in answered]) for answered in (outputs, whole))
        expected[name] = float((ours - theirs).norm() / theirs.norm())
    worst = max(expected, key=lambda name: expected[name])
    assert error == pytest.approx(expected[worst], rel=1e-4)
    assert 1e-3 < error < 0.03
    told = f"its outputs differ from bfloat16's by {error:.1%} ({worst}, the worst of 2; relative, 4 samples)"
    assert capsys.readouterr().out == f"int8 teacher: {told}\n"


def test_without_bitsandbytes_it_says_what_to_install(pipeline, monkeypatch):
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'distiller\[quantization\]'"):
        open_teacher(WatchedNetwork(pipeline), setup(quantization="int8"))


def test_an_error_without_a_finite_ratio_is_infinite():
    zero, one, unknown = torch.zeros(2), torch.ones(2), torch.tensor([1.0, torch.nan])
    quantized = [{"same": zero, "not zero": one, "not finite": unknown, "half": 1.5 * one}]
    reference = [{"same": zero, "not zero": zero, "not finite": one, "half": one}]
    expected = {"same": 0.0, "not zero": torch.inf, "not finite": torch.inf, "half": 0.5}
    assert relative_errors(quantized, reference) == pytest.approx(expected)
