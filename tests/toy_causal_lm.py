"""Small random language models, saved as the library saves them, with a tokenizer of a few words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, DeepseekV3Config, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

from distiller.language.data.batch import IGNORED, LanguageBatch, TokenSample, collate
from tests import toys

WORDS = (
    *("the", "a", "red", "blue", "green", "old", "young", "cat", "dog", "bird", "fox", "runs", "sits", "flies"),
    *("sleeps", "sings", "and", "but", "then", "here"),
)
SPECIAL = ("<pad>", "<eos>", "<unk>")
VOCABULARY = len(SPECIAL) + len(WORDS)


def make_tokenizer(words: tuple[str, ...] = WORDS) -> PreTrainedTokenizerFast:
    """One token a word."""
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<eos>"
    )


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
"""Of the toys below but GPT-2, whose config has other names."""


def llama_config(**changes: Any) -> LlamaConfig:
    """Five layers, grouped heads, tied weights."""
    values = {"num_hidden_layers": 5, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return LlamaConfig(**(SIZES | values | changes))


def deepseek_config(**changes: Any) -> DeepseekV3Config:
    """Two layers or more, the first dense, the others of four experts."""
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    heads = {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    values = layers | experts | heads | {"q_lora_rank": None, "kv_lora_rank": 16}
    return DeepseekV3Config(**(SIZES | values | changes))


def gpt2_config(**changes: Any) -> GPT2Config:
    """Two layers, fused projections, learned positions, biases, dropout."""
    values = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2Config(**(values | {"bos_token_id": 1, "eos_token_id": 1, "initializer_range": 0.3} | changes))


def save_model(folder: Path, config: Any = None, seed: int = 0, tokenizer: Any = None) -> Path:
    """Saves a random model and a tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config or llama_config())
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder


def write_config(file: Path, config: Any) -> Path:
    """A student's config.json."""
    file.write_text(json.dumps(config.to_dict()), encoding="utf-8")
    return file


def sample(sample_id: int, length: int, num_learnt: int | None = None) -> TokenSample:
    """A row of one document; the last `num_learnt` positions but one are learnt (None: all but the last)."""
    generator = torch.Generator().manual_seed(sample_id)
    ids = torch.randint(len(SPECIAL), VOCABULARY, (length,), generator=generator)
    labels = torch.cat([ids[1:], torch.tensor([IGNORED])])
    if num_learnt is not None:
        labels[: length - 1 - num_learnt] = IGNORED
    return TokenSample(sample_id, ids, torch.arange(length), labels)


def batch_of(lengths: list[int], first_id: int = 0) -> LanguageBatch:
    """A batch of such rows."""
    return collate([sample(first_id + number, length) for number, length in enumerate(lengths)], pad_id=0)


def write_texts(file: Path, num_documents: int = 40, seed: int = 5) -> Path:
    """Documents of 2 to 30 words, one a line, as JSON."""
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for _ in range(num_documents):
        length = int(torch.randint(2, 31, (1,), generator=generator))
        words = [WORDS[number] for number in torch.randint(len(WORDS), (length,), generator=generator).tolist()]
        lines.append(json.dumps({"text": " ".join(words)}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def recipe(folder: Path, teacher_path: Path | None = None, /, **sections: Any) -> dict[str, Any]:
    """A recipe that trains in seconds and writes under `folder`; `sections` are merged over it."""
    base: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "seed": 3,
        "task": {"kind": "causal_lm"},
        "teacher": {"path": str(teacher_path)},
        "student": {"num_layers": 2},
        "data": {"kind": "jsonl", "path": str(folder / "texts.jsonl"), "max_length": 32, "packing": False},
        "train": {"max_steps": 6, "batch_size": 8, "log_every": 1},
        "optim": {"lr": 1e-3, "max_grad_norm": 1.0},
        "evaluation": {"max_new_tokens": 4},
    }
    if not (folder / "texts.jsonl").exists():
        write_texts(folder / "texts.jsonl")
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section if isinstance(section, dict) else section
    return base


def write_recipe(folder: Path, config: Any = None, **sections: Any) -> Path:
    """A folder for launches: recipe.yaml with six updates of 8 samples, and a cache of its own."""
    teacher = save_model(folder / "teacher", config)
    data = recipe(folder, teacher, cache_dir=str(folder / "cache"), **sections)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(data))
    return folder


def student_vector(run_dir: Path) -> torch.Tensor:
    """All weights of the exported student as one float64 vector."""
    state = load_file(run_dir / "student" / "model.safetensors")
    return torch.cat([state[name].flatten().double() for name in sorted(state)])


def assert_same_run(run_dir: Path, reference_dir: Path) -> None:
    """The sameness promise: equal loss series, and equal students by the norm of all their weights."""
    ours, theirs = ([line["loss"] for line in toys.read_metrics(folder)] for folder in (run_dir, reference_dir))
    assert len(ours) == len(theirs)
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 2e-5
    ours, theirs = student_vector(run_dir), student_vector(reference_dir)
    assert ((ours - theirs).norm() / theirs.norm()).item() <= 1e-5


def sample_lines(run_dir: Path) -> list[str]:
    """The lines of samples.txt."""
    return (run_dir / "samples.txt").read_text(encoding="utf-8").splitlines()
