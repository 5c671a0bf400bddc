"""What a small random model of a config's kind shows before any weight is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    FalconH1Config,
    Gemma3TextConfig,
    MambaConfig,
    ModernBertDecoderConfig,
    OPTConfig,
    Qwen3Config,
)

from distiller.build import build_task
from distiller.config.loading import parse
from distiller.errors import UserError
from distiller.language.model import behaviour_probe
from distiller.language.model.spec import ModelSpec
from tests import toy_causal_lm

SMALL: dict[str, Any] = {"vocab_size": 23, "hidden_size": 32, "num_hidden_layers": 3}
HEADS = SMALL | {"num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
CONFIGS = {
    "llama": toy_causal_lm.llama_config(),
    "gpt2": toy_causal_lm.gpt2_config(),
    "opt": OPTConfig(**SMALL | OPT),
    "mamba": MambaConfig(**SMALL, state_size=4),
    # As wide as they are used: nothing of that size is made.
    "qwen3": Qwen3Config(num_hidden_layers=4, hidden_size=4096, num_key_value_heads=8),
    "falcon_h1": FalconH1Config(num_hidden_layers=4),
}


@pytest.mark.parametrize(
    ("kind", "separates"),
    [("llama", True), ("gpt2", True), ("qwen3", True), ("opt", False), ("mamba", False), ("falcon_h1", False)],
)
def test_a_small_model_shows_whether_documents_see_each_other(kind, separates):
    state = torch.get_rng_state()
    spec = ModelSpec(CONFIGS[kind], False, kind)
    behaviour = behaviour_probe.observe(spec)
    assert behaviour == behaviour_probe.Behaviour(is_causal=True, separates=separates, has_known_logits=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert behaviour_probe.small_config(spec).num_hidden_layers <= 3


@pytest.mark.parametrize("kind", ["opt", "mamba"])
@pytest.mark.parametrize("owner", ["teacher", "student"])
def test_models_whose_documents_would_see_each_other_are_not_packed(tmp_path, kind, owner):
    config = CONFIGS[kind]
    teacher = toy_causal_lm.save_model(tmp_path / "teacher", config if owner == "teacher" else None)
    student = {"num_layers": 2}
    if owner == "student":
        file = toy_causal_lm.write_config(tmp_path / "student.json", config)
        student = {"num_layers": None, "config": str(file)}
    with pytest.raises(UserError, match=rf"{owner}\..*{kind} the documents of a packed row.*data.packing=false"):
        build_task(parse(toy_causal_lm.recipe(tmp_path, teacher, student=student, data={"packing": True})))
    build_task(parse(toy_causal_lm.recipe(tmp_path, teacher, student=student)))


def test_what_no_small_model_can_be_made_of_is_known_by_its_type(monkeypatch):
    spec = ModelSpec(CONFIGS["llama"], False, "x")
    monkeypatch.setattr(behaviour_probe, "MAX_PARAMETERS", 10)
    assert behaviour_probe.observe(spec) is None
    behaviour_probe.check_behaviour(spec, "x", packs=True)
    monkeypatch.setattr(behaviour_probe, "TYPES_MIXING_PACKED_DOCUMENTS", ("llama",))
    behaviour_probe.check_behaviour(spec, "x", packs=False)
    with pytest.raises(UserError, match=r"x: in model type llama the documents"):
        behaviour_probe.check_behaviour(spec, "x", packs=True)


def test_a_model_with_weights_behind_its_body_is_refused():
    for config in (BertConfig(**HEADS), ModernBertDecoderConfig(**HEADS, pad_token_id=0)):
        with pytest.raises(UserError, match=r"x: \w+ has \S+ between its blocks and its output layer"):
            ModelSpec(config, False, "x")


def test_a_model_whose_tokens_see_what_follows_is_refused():
    small = HEADS | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    behaviour_probe.check_behaviour(ModelSpec(Gemma3TextConfig(**small), False, "x"), "x", packs=True)
    spec = ModelSpec(Gemma3TextConfig(**small, use_bidirectional_attention=True), False, "x")
    with pytest.raises(UserError, match="lets a token see those that follow it"):
        behaviour_probe.check_behaviour(spec, "x", packs=False)
