"""Applies to a config, or refuses, the metadata of a GGUF file that transformers' reader ignores.

The reader maps some keys of each architecture and silently drops the others, even those that change the results:
scaled rotary positions, sliding windows, caps of logits, widths of heads. Names of keys and tensors are those of
llama.cpp (https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py).
"""

# Names that the libraries import lazily, or from C, without exporting them in their stubs.
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config

from distiller.errors import UserError
from distiller.language.gguf.rope import ROPE_KEYS, apply_rope

READER_NAMES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
"""llama.cpp's name of an architecture -> the name in transformers' reader, where they differ."""

WITHOUT_EFFECT = frozenset(
    [
        *("vocab_size", "block_count", "context_length", "embedding_length", "feed_forward_length"),
        *("attention.head_count", "attention.head_count_kv", "tensor_data_layout", "expert_group_count"),
        *("decoder_start_token_id", "rope.scaling.finetuned"),
    ]
)
"""Keys that are ignored: sizes, which the shapes of the tensors hold as well, and what no result depends on."""

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("v_head_dim", "head_dim"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logit_scale",),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "use_parallel_residual": ("use_parallel_residual",),
    "residual_scale": ("residual_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
}
"""Key -> names of config attributes; the first of them that the config has is set to the key's value."""

OPTIONAL = ("attn_logit_softcapping", "final_logit_softcapping")
"""Keys whose attribute is None in models without the feature. The config's default may be a number."""

LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Architecture -> layers of its model of 27 billion parameters. llama.cpp knows that model by this number, and scales
its attention by another width than a head's, for which the format has no key (src/models/gemma2.cpp, gemma3.cpp)."""

NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "logit_scale": 1.0,
    "expert_weights_scale": 1.0,
    "expert_gating_func": 1,
    "pooling_type": 0,
}
"""Key -> the value, other than 0, with which it changes nothing."""


def apply_metadata(config: Any, metadata: Mapping[str, Any], tensors: Mapping[str, Any], origin: str) -> None:
    """Sets the config's attributes to the values in the file.

    Args:
        config: a config of transformers, as the reader makes it from the file; changed in place.
        metadata: the file's keys and values; the strings inside of lists are not read.
        tensors: the file's factors of rotary positions, float32 arrays by the names in `FACTOR_TENSORS`.
        origin: the file's name, with which messages begin.

    Raises:
        UserError: a key changes what the model computes, and the config has no attribute for it.
    """
    architecture = metadata["general.architecture"]
    prefix, known = f"{architecture}.", applied_keys(architecture, metadata, tuple(tensors))
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if architecture == "llama" and hasattr(config, "sliding_window"):
        # The reader makes a Mistral config where the model's name says so; llama.cpp has no window for "llama".
        config.sliding_window = None
    if architecture in LAYERS_OF_27B:
        is_27b = values.get("block_count") == LAYERS_OF_27B[architecture]
        own_scale = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = own_scale if is_27b else config.head_dim
    apply_rope(config, values, tensors, known, origin, prefix)
    for key, value in values.items():
        if key in known or key in WITHOUT_EFFECT or key in ROPE_KEYS or value == NEUTRAL.get(key):
            continue
        if not value and not isinstance(value, bool):
            # In llama.cpp, 0 or an empty value means that the model has no such feature.
            if key in OPTIONAL and hasattr(config, key):
                setattr(config, key, None)
            continue
        name = next((name for name in ATTRIBUTES.get(key, ()) if hasattr(config, name)), None)
        widths = ("attention.key_length", "attention.value_length")
        if name is None and key in widths and value == config.hidden_size // config.num_attention_heads:
            continue
        if name is None and value is False and key != "attention.causal":
            continue
        if name is None:
            raise UserError(
                f"{origin}: its key {prefix}{key} ({value}) changes what the model computes, and transformers' "
                f"{type(config).__name__} has no such thing; give the model's folder of transformers instead"
            )
        if isinstance(value, float):
            # The file has the float32 nearest to a short decimal number such as 1e-6; the config gets that number.
            value = float(f"{value:.7g}")
        setattr(config, name, value)


def applied_keys(architecture: str, metadata: Mapping[str, Any], tensors: Collection[str]) -> set[str]:
    """The keys, without the architecture's prefix, that transformers' reader applies to the config."""
    if architecture in GGUF_CONFIG_ARCHS:
        read = _Recording(metadata)
        get_gguf_config(read, tuple(tensors))
        return {key.removeprefix(f"{architecture}.") for key in read.keys_read}
    mapping = GGUF_CONFIG_MAPPING[READER_NAMES.get(architecture, architecture)]
    return {key for key, name in mapping.items() if name is not None}


class _Recording(dict[str, Any]):
    """Metadata that records which keys are read."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        super().__init__(metadata)
        self.keys_read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:  # type: ignore[override]
        self.keys_read.add(key)
        return super().get(key, default)
