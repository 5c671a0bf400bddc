"""A model type of each way in which transformers reads a teacher's files; the sweep of all of them writes the docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from distiller import commands
from distiller.config.loading import parse
from distiller.errors import UserError
from distiller.language.model.files import find_model
from distiller.language.model.weight_conversion import CONVERTED
from tests import language_sweep, toy_causal_lm

SMALL = {
    "vocab_size": toy_causal_lm.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip


def config_of(kind: str, **changes: Any) -> Any:
    """A small config of a type."""
    return AutoConfig.for_model(kind, **SMALL | {"initializer_range": 0.3} | changes)


@pytest.mark.parametrize(
    ("kind", "changes", "is_converted"),
    [
        ("llama", {}, False),
        # Renamed while it is read.
        ("gpt_neox", {}, False),
        # Its experts are one tensor in the model.
        ("mixtral", EXPERTS, True),
        # The same, and a router's bias that stays in float32.
        ("deepseek_v3", DEEPSEEK, True),
        # Another kind of body, with infinity in its config.
        ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8}, False),
    ],
)
def test_a_teachers_logits_are_the_librarys(tmp_path, kind, changes, is_converted):
    row = language_sweep.sweep_config(kind, config_of(kind, **changes), tmp_path)
    assert row.refusal is None
    assert row.is_converted is is_converted
    assert row.float32 <= language_sweep.TOLERANCE
    assert row.bfloat16 <= language_sweep.TOLERANCE


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    language_sweep.save(config_of("mixtral", **EXPERTS), folder)
    return folder / "teacher"


def recipe(tmp_path: Path, teacher: Path, **sections: Any) -> Any:
    return parse(toy_causal_lm.recipe(tmp_path, teacher, cache_dir=str(tmp_path / "cache"), **sections))


@pytest.mark.parametrize("student", ["layers", "path"])
def test_a_student_of_a_converted_teacher_is_a_model_of_the_library(mixtral, tmp_path, student):
    """Cut out of the teacher or equal to it, trained by next to nothing, it is written as the library writes it."""
    given = {"num_layers": 2} if student == "layers" else {"num_layers": None, "path": str(mixtral)}
    sections = {"train": {"max_steps": 1, "batch_size": 2}, "optim": {"lr": 1e-12}, "evaluation": {"num_samples": 0}}
    options = recipe(tmp_path, mixtral, student=given, **sections)
    commands.train(options, False)
    folder = Path(options.output_dir) / "student"
    assert set(load_file(folder / "model.safetensors")) == set(load_file(mixtral / "model.safetensors"))
    batch = toy_causal_lm.batch_of([12])
    ours, theirs = (language_sweep.library_logits(path, batch, torch.float32) for path in (folder, mixtral))
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)


def test_a_converted_copy_is_made_once_and_in_the_files_dtype(mixtral, tmp_path):
    folder = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.bfloat16).save_pretrained(folder)
    found = find_model("teacher", str(folder), None, None, tmp_path / "stages", trusts_code=False)
    assert not (tmp_path / "stages").exists()
    files = found.weight_files()
    assert [file.parent.name.startswith(CONVERTED) for file in files] == [True]
    assert {tensor.dtype for file in files for tensor in load_file(file).values()} == {torch.bfloat16}
    times = [file.stat().st_mtime_ns for file in files]
    assert [file.stat().st_mtime_ns for file in found.weight_files()] == times


def change(source: Path, folder: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    """A copy whose weights have other tensors; None takes one out."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    state = load_file(folder / "model.safetensors") | changes
    kept = {name: value for name, value in state.items() if value is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


EXPERT = "model.layers.0.block_sparse_moe.experts.0.w1.weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.norm.weight": None}, "its weights lack model.norm.weight"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, "hold model.layers.0.self_attn.q_proj.bias, which"),
        ({"model.layers.9.input_layernorm.weight": torch.ones(32)}, "hold model.layers.9.input_layernorm.weight"),
        ({"model.norm.weight": torch.ones(33)}, "model.norm.weight has shape [33] in the weights and [32]"),
        ({EXPERT: None}, "its weights"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_files_of_another_config_are_refused_before_any_weight(mixtral, tmp_path, kind, changes, words):
    if kind == "llama":
        if EXPERT in changes:
            pytest.skip("it has no experts")
        language_sweep.save(config_of("llama"), tmp_path)
    folder = change(mixtral if kind == "mixtral" else tmp_path / "teacher", tmp_path / "changed", changes)
    with pytest.raises(UserError) as caught:
        find_model("teacher", str(folder), None, None, tmp_path / "stages", trusts_code=False)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "stages").exists()


def test_another_head_and_old_buffers_are_left_out(mixtral, tmp_path):
    extra = {"v_head.summary.weight": torch.ones(1, 32), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    folder = change(mixtral, tmp_path / "changed", extra)
    row = language_sweep.compare("mixtral", folder, tmp_path)
    assert (row.refusal, row.float32) == (None, 0.0)


def test_the_page_has_every_type(tmp_path):
    """The sweep takes minutes: `python -m tests.language_sweep` after every change of transformers."""
    page = language_sweep.PAGE.read_text(encoding="utf-8")
    lacking = [kind for kind in language_sweep.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if f"| `{kind}` |" not in page]
    assert lacking == []
    assert "FAULT" not in page


def test_infinity_in_a_config_is_a_number(tmp_path):
    language_sweep.save(config_of("mamba2", num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=8), tmp_path)
    assert "__float__" in json.dumps(json.loads((tmp_path / "teacher" / "config.json").read_text()))
    found = find_model("teacher", str(tmp_path / "teacher"), None, None, tmp_path, trusts_code=False)
    assert found.anatomy.config.time_step_limit[1] == float("inf")


def test_what_half_precision_does_not_round_is_in_a_caches_key(tmp_path):
    """Of a Llama nothing, so that its caches stay as they are."""
    for kind, changes, expected in (
        ("llama", {}, set()),
        ("deepseek_v3", DEEPSEEK, {f"layers.1.mlp.gate.{part}" for part in ("weight", "e_score_correction_bias")}),
    ):
        folder = tmp_path / kind
        language_sweep.save(config_of(kind, **changes), folder)
        found = find_model("teacher", str(folder / "teacher"), None, None, tmp_path, trusts_code=False)
        assert set(found.anatomy.other_dtypes(torch.bfloat16)) == expected
        assert found.anatomy.other_dtypes(torch.float32) == {}
