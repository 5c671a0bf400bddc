"""Greedy generation with the library's key-value cache gives the tokens that are found without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, GenerationConfig, MambaConfig

from distiller.language.generation import generate_greedily, generate_with_cache, model_hidden_states
from distiller.language.model.logits import Head, TokenIds, change_of
from distiller.language.model.spec import new_model
from tests import toy_causal_lm

SMALL: dict[str, Any] = {"vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 2}
CONFIGS: dict[str, Any] = {
    "llama": toy_causal_lm.llama_config,
    "gpt2": toy_causal_lm.gpt2_config,
    "sliding window, soft cap": lambda: Gemma2Config(
        **SMALL,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=4,
        tie_word_embeddings=False,
    ),
    "state space": lambda: MambaConfig(**SMALL, state_size=4, conv_kernel=3),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_cache_changes_no_token(kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = new_model(CONFIGS[kind](), False).eval()
        # Larger weights: those of a new model say the same token again and again.
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    output = model.get_output_embeddings()
    prompts = [[2, 5, 3], [7, 2, 4, 4, 6, 5, 2, 3, 8]]
    # What a file may ask for is not greedy.
    model.generation_config = GenerationConfig(do_sample=True, temperature=5.0, repetition_penalty=3.0, eos_token_id=4)
    for ids in (TokenIds(output.weight.shape[0]), TokenIds(output.weight.shape[0] - 4, (5, 7))):
        head = Head(output.weight, output.bias, change_of(model.config), ids)
        expected = generate_greedily(model_hidden_states(model), head, prompts, 12, 0)
        assert generate_with_cache(model, ids, prompts, 12, 0) == expected
        assert len({token for tokens in expected for token in tokens}) > 2
