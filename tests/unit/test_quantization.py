"""Quantised teachers: what a layer computes, which layers are quantised, and how near outputs are to the floats'."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import bitsandbytes
import pytest
import torch
from diffusers import BitsAndBytesConfig, WanTransformer3DModel
from diffusers.quantizers.bitsandbytes.utils import replace_with_bnb_linear
from safetensors.torch import save_file
from torch import nn

from distiller.build import build_task
from distiller.config.loading import parse
from distiller.config.teacher import Teacher
from distiller.diffusion.families import find_pipeline
from distiller.diffusion.network import DiffusionNetwork
from distiller.errors import UserError
from distiller.storage.weight_files import WeightFiles
from distiller.teachers import Outputs, Request, rules
from distiller.teachers.base import Call
from distiller.teachers.factory import open_teacher
from distiller.teachers.quantization.error import _choose, measure_error
from distiller.teachers.quantization.error import _errors as relative_errors
from distiller.teachers.quantization.files import QuantizedFiles
from distiller.teachers.quantization.layers import QuantizedLinear, layer_class, why_not_on
from distiller.teachers.quantization.modules import convert_linears, plan_quantized_modules
from tests import toy_causal_lm, toys
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


def layer_of(linear: nn.Linear, quantization: str) -> QuantizedLinear:
    kind = layer_class(quantization)
    return kind(*kind.quantize(linear.weight.detach()), linear.bias, linear.weight.shape, linear.weight.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("quantization", "largest_error"), [("int8", 0.01), ("fp8", 0.05), ("nf4", 0.12)])
def test_a_layer_is_near_to_the_one_that_it_replaces(quantization, largest_error, dtype):
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 48).to(dtype), torch.randn(3, 7, 64).to(dtype)
    # Channels of very different size, and one that is 0.
    with torch.no_grad():
        linear.weight *= torch.logspace(-3, 1, 48)[:, None].to(dtype)
        linear.weight[5] = 0
    layer = layer_of(linear, quantization)
    with torch.no_grad():
        expected, output = linear(x), layer(x)
        assert output.dtype == layer.weight.dtype == dtype
        assert 1e-4 * expected.norm() < (output - expected).norm() < largest_error * expected.norm()
        if quantization != "nf4":
            by_channel = (output - expected).norm(dim=(0, 1)) / expected.norm(dim=(0, 1)).clamp(min=1e-6)
            assert by_channel.max() < 2 * largest_error
        assert torch.allclose(output[..., 5], expected[..., 5], rtol=2**-8)
        assert torch.equal(layer(x[None, None]), output[None, None])
        assert torch.equal(layer(x[1:2]), output[1:2])
        x[0, 3] = torch.inf
        assert not torch.isfinite(layer(x)[0, 3]).any()
        assert torch.equal(layer(x)[1:], output[1:])


def test_int8_and_fp8_are_rounded_to_the_nearest_value():
    weight = torch.tensor([[127.0, 1.4, -1.6, 0.0], [-254.0, 2.0, 3.1, 5.0]])
    quantized, scales = layer_class("int8").quantize(weight)
    assert scales.tolist() == [1.0, 2.0]
    assert quantized.tolist() == [[127, 1, -2, 0], [-127, 1, 2, 2]]
    quantized, scales = layer_class("fp8").quantize(weight * 448 / 127)
    assert scales.tolist() == pytest.approx([1.0, 2.0])
    # Near 5 values lie 0.5 apart, near 9 they lie 1 apart.
    assert quantized.float().tolist() == [[448, 5, -5.5, 0], [-448, 3.5, 5.5, 9]]


def test_nf4_is_that_of_bitsandbytes():
    torch.manual_seed(0)
    linear, x = nn.Linear(128, 96, bias=False), torch.randn(5, 128)
    theirs = bitsandbytes.nn.Linear4bit(128, 96, bias=False, quant_type="nf4", compress_statistics=False)
    theirs.load_state_dict(linear.state_dict())
    theirs = theirs.to("cpu")
    with torch.no_grad():
        assert (layer_of(linear, "nf4")(x) - theirs(x)).norm() < 1e-5 * theirs(x).norm()
        # Rows that are shorter than a block: bitsandbytes' own is off by half on a CPU.
        short = nn.Linear(16, 64, bias=False)
        error = layer_of(short, "nf4")(x[:, :16]) - short(x[:, :16])
        assert error.norm() < 0.15 * short(x[:, :16]).norm()


@pytest.mark.parametrize("quantization", ["int8", "fp8", "nf4"])
def test_no_rows_and_permuted_rows_are_computed_as_by_a_linear_layer(quantization):
    torch.manual_seed(0)
    linear = nn.Linear(64, 32)
    layer, picture = layer_of(linear, quantization), torch.randn(1, 64, 3, 5)
    rows = picture.permute(0, 2, 3, 1).reshape(1, 15, 64)
    assert not rows.is_contiguous()
    with torch.no_grad():
        assert layer(torch.empty(2, 0, 64)).shape == linear(torch.empty(2, 0, 64)).shape
        assert torch.equal(layer(rows), layer(rows.contiguous()))


def test_layers_that_are_not_called_as_linear_layers_stay_as_they_are():
    class Router(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x), x

    class MambaMixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dt_proj = nn.Linear(64, 64)

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A_log, self.out_proj = nn.Parameter(torch.empty(4)), nn.Linear(64, 64)

    with torch.device("meta"):
        module = nn.ModuleDict({"router": Router(64, 64), "mamba": MambaMixer(), "mixer": Mixer()})
        module["attention"], module["plain"] = nn.MultiheadAttention(64, 4), nn.Linear(64, 64)
    assert convert_linears(module, (), layer_class("int8")) == {"plain.weight"}


@pytest.mark.parametrize("quantization", ["int8", "fp8", "nf4"])
def test_files_quantise_each_weight_once_in_slices_that_change_nothing(tmp_path, monkeypatch, quantization):
    monkeypatch.setattr("distiller.teachers.quantization.files.SLICE_NUMBERS", 64 * 48)
    weights = {f"{i}.weight": torch.randn(200, 48) for i in range(6)}
    save_file(weights | {"bias": torch.ones(3)}, tmp_path / "weights.safetensors")
    kind, num_calls = layer_class(quantization), []

    def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_calls.append(len(weight))
        return kind.quantize(weight)

    plain = WeightFiles([tmp_path / "weights.safetensors"])
    files = QuantizedFiles(plain, weights.keys(), quantize, torch.float32, torch.device("cpu"))
    expected = {}
    for name, weight in weights.items():
        expected[f"{name.removesuffix('weight')}quantized_weight"], expected[f"{name}_scales"] = kind.quantize(weight)
    assert files.tensors.keys() == {*expected, "bias"}
    read = {name: torch.empty_like(value) for name, value in expected.items()}
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(files.read, read, read.values()))
    assert all(torch.equal(read[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)
    assert sorted(num_calls) == sorted([64, 64, 64, 8] * 6)
    files.close()


def test_a_small_share_of_quantised_layers_is_said(pipeline, capsys, monkeypatch):
    network = WatchedNetwork(pipeline)
    answers(network, quantization="int8")
    assert "note" not in capsys.readouterr().out
    monkeypatch.setattr("distiller.teachers.quantization.modules.SMALL_SHARE", 0.99)
    answers(network, quantization="int8")
    assert re.search(r"note: int8 teacher: \d\d% of its bytes are in linear layers", capsys.readouterr().out)


def test_layers_whose_size_does_not_suit_stay_as_they_are():
    for quantization, accepted in (("int8", {"a", "b", "c"}), ("fp8", {"a"}), ("nf4", {"a", "b"})):
        with torch.device("meta"):
            module = nn.ModuleDict({"a": nn.Linear(32, 16), "b": nn.Linear(8, 16), "c": nn.Linear(7, 9)})
        converted = convert_linears(module, (), layer_class(quantization))
        assert converted == {f"{name}.weight" for name in accepted}


def test_diffusers_would_convert_the_same_layers(pipeline):
    network = WatchedNetwork(pipeline)
    plan = plan_quantized_modules(network, setup(torch.bfloat16, quantization="int8"), is_reader=False)[0]
    ours = {name for name, module in plan.module.named_modules() if isinstance(module, QuantizedLinear)}
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
    names = convert_linears(module, (), layer_class("int8"))
    assert names == {"first.weight", "second.weight", "third.weight"}
    assert module.second is module.first
    assert module.third.quantized_weight is module.first.quantized_weight
    assert module.third.weight_scales is module.first.weight_scales
    assert isinstance(module.head, nn.Linear)


@pytest.mark.parametrize(("quantization", "largest_error"), [("int8", 0.02), ("fp8", 0.1), ("nf4", 0.25)])
def test_answers_are_close_to_the_floats(pipeline, tmp_path, quantization, largest_error):
    network = WatchedNetwork(pipeline)
    floats, _ = answers(network)
    outputs, _ = answers(network, quantization=quantization)
    for ours, theirs in zip(outputs, floats, strict=True):
        assert 0 < (ours - theirs).norm() < largest_error * theirs.norm()
    for placement in ("balanced", "streamed", "disk"):
        elsewhere, _ = answers(network, quantization=quantization, placement=placement, stages_dir=tmp_path)
        assert all(torch.equal(a, b) for a, b in zip(outputs, elsewhere, strict=True)), placement


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_can_be_quantised(pipeline, dtype):
    network = WatchedNetwork(pipeline)
    floats, _ = answers(network, dtype)
    for ours, theirs in zip(answers(network, dtype, quantization="int8")[0], floats, strict=True):
        assert 0 < (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize(("quantization", "share"), [("int8", 0.62), ("fp8", 0.62), ("nf4", 0.4)])
def test_quantised_weights_take_less_memory(pipeline, quantization, share):
    network = WatchedNetwork(pipeline)
    _, whole = answers(network)
    size = network.modules["transformer"].blocks[0].ffn.net[2].weight.nbytes
    _, held = answers(network, quantization=quantization)
    layer = network.modules["transformer"].blocks[0].ffn.net[2]
    assert layer.quantized_weight.nbytes * (4 if quantization == "nf4" else 2) == size
    assert held < share * whole
    kept = network.modules["transformer"].condition_embedder.time_embedder.linear_1.weight
    assert kept.dtype == torch.float32


def test_quantised_files_are_written_once_and_again_for_other_weights(pipeline, tmp_path, capsys):
    network, options = WatchedNetwork(pipeline), {"quantization": "int8", "placement": "disk", "stages_dir": tmp_path}
    first, _ = answers(network, **options)
    assert capsys.readouterr().out.count("GiB of quantised weights into ") == 2
    second, _ = answers(network, **options)
    assert capsys.readouterr().out == ""
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    answers(network, **options | {"quantization": "fp8"})
    answers(network, torch.float16, **options)
    assert len(list(tmp_path.glob("quantized-weights-*/key.json"))) == 6


def test_a_disk_too_small_for_quantised_files_is_refused(pipeline, tmp_path, monkeypatch):
    monkeypatch.setattr("distiller.teachers.quantization.stored.shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(UserError, match=r"they take 0\.00 GiB and .* has 0\.00 GiB free; choose another cache_dir"):
        answers(WatchedNetwork(pipeline), quantization="int8", placement="disk", stages_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_for_quantised_files_that_cannot_be_written_is_refused(pipeline, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"disk keeps quantised weights in files, .*; choose another cache_dir"):
        answers(
            WatchedNetwork(pipeline), quantization="int8", placement="disk", stages_dir=tmp_path / "file" / "stages"
        )


def requests_of_one(count: int = 5) -> list[Request]:
    inputs = inputs_for(count)
    return [
        Request((i,), {k: v[i : i + 1] for k, v in inputs.items()}, ("prediction", "features/1"), (i % 2,))
        for i in range(count)
    ]


@pytest.mark.parametrize("placement", ["replicated", "balanced", "disk"])
def test_its_error_is_that_of_the_whole_teachers_answers(pipeline, placement, capsys, tmp_path):
    network, asked = WatchedNetwork(pipeline), requests_of_one()
    whole = open_teacher(network, setup(torch.bfloat16)).predict(asked)
    options = setup(torch.bfloat16, quantization="int8", placement=placement, stages_dir=tmp_path)
    teacher = open_teacher(network, options)
    capsys.readouterr()
    outputs = teacher.predict(asked)
    measured = measure_error(network, options, teacher, iter(asked))
    teacher.close()
    error = measured.relative

    def expected_of(indices: Sequence[int]) -> dict[str, float]:
        errors = {}
        for name in ("prediction", "features/1"):
            ours, theirs = (torch.cat([found[i][name].double() for i in indices]) for found in (outputs, whole))
            errors[name] = float((ours - theirs).norm() / theirs.norm())
        return errors

    expected = expected_of(range(5))
    worst = max(expected, key=lambda name: expected[name])
    assert error == pytest.approx(expected[worst], rel=1e-4)
    assert 1e-3 < error < 0.02
    in_bands = {"timesteps 0 to 333": [0], "timesteps 333 to 666": [2, 3], "timesteps 666 to 1000": [1, 4]}
    bands = {name: max(expected_of(indices).values()) for name, indices in in_bands.items()}
    assert measured.bands == pytest.approx(bands, rel=1e-4)
    assert measured.figures == {}
    assert measured.largest == pytest.approx(max(error, *bands.values()), rel=1e-4)
    told = f"its outputs differ from bfloat16's by {error:.1%} ({worst}, the worst of 2; relative, 5 samples; "
    told += "; ".join(f"{name}: {value:.2%}" for name, value in measured.bands.items()) + ")"
    assert capsys.readouterr().out == f"int8 teacher: {told}\n"


def test_at_most_two_samples_of_a_kind_are_used(pipeline):
    network, asked = WatchedNetwork(pipeline), requests_of_one()
    chosen = _choose(network, [asked[0], asked[2], asked[0], asked[0], asked[1], *asked])
    assert [request.sample_ids[0] for request in chosen] == [0, 2, 0, 1, 1, 2, 3, 4]


def test_an_error_above_the_limit_is_refused(pipeline, tmp_path):
    network = WatchedNetwork(pipeline)
    for limit, is_refused in ((0.0001, True), (0.5, False)):
        options = setup(torch.bfloat16, quantization="int8", max_quantization_error=limit)
        teacher = open_teacher(network, options)
        if is_refused:
            with pytest.raises(UserError, match=r"at timesteps \d.*, is above teacher\.max_.* \(0\.01%\); choose"):
                measure_error(network, options, teacher, requests_of_one())
        else:
            measure_error(network, options, teacher, requests_of_one())


def test_without_bitsandbytes_it_says_what_to_install(pipeline, monkeypatch):
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'distiller\[quantization\]'"):
        open_teacher(WatchedNetwork(pipeline), setup(quantization="nf4"))
    open_teacher(WatchedNetwork(pipeline), setup(quantization="int8"))


def test_a_model_without_linear_layers_is_refused(tmp_path):
    """GPT-2 has layers of its own instead."""
    model = toy_causal_lm.save_model(tmp_path / "gpt2", toy_causal_lm.gpt2_config())
    task = build_task(parse(toy_causal_lm.recipe(tmp_path, model)))
    with pytest.raises(UserError, match=r"quantization is int8 and .*gpt2.* has no linear layer that it takes"):
        open_teacher(task.network, setup(quantization="int8"))


def test_a_device_without_such_products_is_refused(pipeline, monkeypatch):
    assert why_not_on("fp8", torch.device("cpu")) == ""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no such product\nat some line")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    with pytest.raises(UserError, match=r"quantization is fp8 and torch .* on cpu here \(no such product\); choose"):
        open_teacher(WatchedNetwork(pipeline), setup(quantization="fp8"))


def test_an_error_without_a_finite_ratio_is_infinite():
    zero, one, unknown = torch.zeros(2), torch.ones(2), torch.tensor([1.0, torch.nan])
    quantized = [{"same": zero, "not zero": one, "not finite": unknown, "half": 1.5 * one}]
    reference = [{"same": zero, "not zero": zero, "not finite": one, "half": one}]
    expected = {"same": 0.0, "not zero": torch.inf, "not finite": torch.inf, "half": 0.5}
    assert relative_errors(quantized, reference) == pytest.approx(expected)
