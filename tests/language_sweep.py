"""Every causal language model of the installed transformers as a teacher: `python -m tests.language_sweep`.

A small model of each type with random weights is saved as the library saves it and found as a recipe's teacher, which
is what `--check` does. What is not refused there is loaded block by block, and its logits are compared with those of
the library's own `from_pretrained`. Writes docs/language-model-types.md; with types as arguments it prints their rows.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from distiller.build import build_task
from distiller.config.loading import parse
from distiller.errors import UserError
from distiller.language.data.batch import LanguageBatch, collate
from distiller.language.generation import teacher_hidden_states
from distiller.language.model.behaviour_probe import MAX_PARAMETERS, small_config
from distiller.language.model.spec import ModelSpec, new_model
from distiller.teachers.factory import open_alone
from tests import toy_causal_lm

PAGE = Path(__file__).parents[1] / "docs" / "language-model-types.md"
HEAD = """# Language models that can be teachers, by their type

Written by `python -m tests.language_sweep`, with transformers {version}: for each `model_type` that
`AutoModelForCausalLM` knows, a small random model of its default config. It was saved by the library, found as a
teacher, as `--check` does it, loaded block by block (`teacher.placement: streamed`) and compared with the library's
own `from_pretrained`. "float32" and "bfloat16": the largest difference of two logits, as a share of the largest logit.
"read": `directly`, or `converted`: the library changes tensors while it loads them, so a converted copy is made once.
"""
CHANGES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {
        **{"d_model": 256, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 128},
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 256, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"moe_intermediate_size": 1408, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4},
    "falcon": {"hidden_size": 512, "num_attention_heads": 8, "num_kv_heads": 8, "ffn_hidden_size": 2048},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 48},
    "nemotron_h": {"moe_intermediate_size": 2048},
    "prophetnet": {
        **{"hidden_size": 64, "num_decoder_layers": 2, "num_decoder_attention_heads": 4, "decoder_ffn_dim": 64},
        **{"num_encoder_layers": 2, "vocab_size": 128},
    },
    "qwen4_exp_text": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 64},
        **{"indexer_compress_ratio": 4, "output_gate_type": "sigmoid"},
    },
    "zamba": {
        **{"hidden_size": 64, "attention_hidden_size": 128, "attention_head_dim": 32, "intermediate_size": 128},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128, "num_hidden_layers": 18},
    },
    "olmo_hybrid": {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
}
"""What a default config lacks."""
UNTRIED = ("transformers cannot build a model of this config", "no small model")
SMALL_ALREADY = ("dbrx", "prophetnet", "zamba")
"""Configs that cannot be made smaller: parts that repeat the width, no number of layers."""
TOLERANCE = 1e-5
LIMIT_S = 300
"""For one type: the largest take a minute on an idle core."""


@dataclass(frozen=True)
class Row:
    """What became of one type: a refusal, or how far its logits are from the library's, and how it was read."""

    kind: str
    refusal: str | None = None
    float32: float = 0.0
    bfloat16: float = 0.0
    is_converted: bool = False


def sweep(kind: str, folder: Path) -> Row:
    """Tries one type in an empty folder. Raises whatever a refusal of `--check` in one line is not."""
    try:
        config = CONFIG_MAPPING[kind](**CHANGES.get(kind, {}))
    except Exception as error:
        return Row(kind, refusal=f"no small model: {' '.join(str(error).split())}")
    try:
        spec = ModelSpec(copy.deepcopy(config), False, kind)
    except UserError as error:
        return Row(kind, refusal=str(error).removeprefix(f"{kind}: "))
    return sweep_config(kind, config if kind in SMALL_ALREADY else small_config(spec), folder)


def sweep_config(kind: str, config: Any, folder: Path) -> Row:
    """Tries one small config."""
    with init_empty_weights():
        if new_model(config, False).num_parameters() > 4 * MAX_PARAMETERS:
            return Row(kind, refusal="no small model: its widths cannot be divided")
    save(config, folder)
    return compare(kind, folder / "teacher", folder)


def compare(kind: str, model: Path, folder: Path) -> Row:
    """Tries one saved model; `folder` is for everything else."""
    sections = {
        "teacher": {"placement": "streamed"},
        "student": {"num_layers": None, "path": str(model)},
        "data": {"packing": False},
    }
    base = toy_causal_lm.recipe(folder, model, cache_dir=str(folder / "cache"), **sections)
    base["data"]["max_length"] = 16
    recipe = parse(base)
    try:
        task: Any = build_task(recipe)
    except UserError as error:
        return Row(kind, refusal=str(error).removeprefix(f"teacher.path: {model}: "))
    batch = collate([toy_causal_lm.sample(number, length) for number, length in enumerate((12, 16, 5))], pad_id=0)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        ours = teacher_logits(task, recipe, batch, dtype)
        # Ids that stand for no token are compared by nothing.
        expected = library_logits(model, batch, dtype)[..., : ours.shape[-1]]
        counts = batch.labels.flatten() != -100
        difference = (ours - expected).flatten(0, 1)[counts].abs().max()
        found[dtype] = float(difference / expected.abs().max())
    is_converted = any("converted" in str(file) for file in task.files.weight_files())
    return Row(kind, None, found[torch.float32], found[torch.bfloat16], is_converted)


def save(config: Any, folder: Path) -> None:
    """A model whose biases, gates and norms are not those of a new one, which would hide what they do."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for value in model.state_dict().values():
                if value.is_floating_point():
                    value.add_(0.05 * torch.randn_like(value))
    model.save_pretrained(folder / "teacher")
    toy_causal_lm.make_tokenizer().save_pretrained(folder / "teacher")


@torch.no_grad()
def library_logits(folder: Path, batch: LanguageBatch, dtype: torch.dtype) -> torch.Tensor:
    """Of the library's own model, in eval mode, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    return model(**inputs, use_cache=False).logits.float()


@torch.no_grad()
def teacher_logits(task: Any, recipe: Any, batch: LanguageBatch, dtype: torch.dtype) -> torch.Tensor:
    """Of the product's teacher: hidden states under the output layer, scaled and capped as the model does; float32."""
    teacher = open_alone(task.network, recipe, dtype, torch.device("cpu"))
    head = task.network.load_head(dtype, torch.device("cpu"))
    hidden = teacher_hidden_states(teacher)(batch)
    teacher.close()
    logits = torch.nn.functional.linear(hidden.to(head.weight.dtype), head.weight, head.bias)
    return head.change.apply(logits).float()[..., : head.ids.size]


def table(rows: list[Row]) -> str:
    """The page's tables: what can be a teacher, and what is refused and why."""
    lines = ["", "| type | read | float32 | bfloat16 |", "| --- | --- | --- | --- |"]
    for row in rows:
        if row.refusal is None:
            read = "converted" if row.is_converted else "directly"
            lines.append(f"| `{row.kind}` | {read} | {row.float32:.0g} | {row.bfloat16:.0g} |")
    refused = [row for row in rows if row.refusal is not None]
    untried = [row for row in refused if (row.refusal or "").startswith(UNTRIED)]
    for title, found in (
        ("Refused by `--check`", [row for row in refused if row not in untried]),
        ("Not tried: the library makes no small model of the default config", untried),
    ):
        lines += ["", f"## {title}", "", "| type | why |", "| --- | --- |"]
        lines += [f"| `{row.kind}` | {' '.join((row.refusal or '').split())} |" for row in found]
    return "\n".join(lines) + "\n"


def main(kinds: list[str]) -> None:
    """Sweeps the types, each in a folder of its own."""
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, _stop)
    rows = []
    for kind in kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            signal.alarm(LIMIT_S)
            try:
                row = sweep(kind, Path(folder))
            except Exception as error:
                row = Row(kind, refusal=f"FAULT {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            signal.alarm(0)
        print(row, flush=True)
        rows.append(row)
    if not kinds:
        PAGE.write_text(HEAD.format(version=transformers.__version__) + table(rows), encoding="utf-8")


def _stop(*_: Any) -> None:
    raise TimeoutError(f"longer than {LIMIT_S} s")


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(sys.argv[1:])
