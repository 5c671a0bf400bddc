"""Finds out what a model's code does, before weights are read: runs a small random model of its config on the CPU."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any, final

import torch
from accelerate import init_empty_weights
from torch import Tensor

from distiller.data import rng
from distiller.errors import UserError
from distiller.language.model.layer_subset import keep_layers
from distiller.language.model.logits import change_of, suspicious_keys
from distiller.language.model.spec import ModelSpec, new_model

TYPES_MIXING_PACKED_DOCUMENTS = frozenset(
    [
        "afmoe",
        "bamba",
        "bart",
        "bigbird_pegasus",
        "biogpt",
        "blenderbot-small",
        "bloom",
        "deepseek_v4",
        "falcon_h1",
        "falcon_mamba",
        "gpt_oss",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lara_mini",
        "lfm3",
        "mamba",
        "mamba2",
        "marian",
        "mbart",
        "minimax",
        "mpt",
        "mvp",
        "openai-gpt",
        "opt",
        "pegasus",
        "plbart",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "rwkv",
        "trocr",
        "xglm",
        "zamba2",
        "zaya",
        "bailing_hybrid",
        "lfm2",
        "lfm2_moe",
        "nemotron_h",
        "olmo_hybrid",
        "zamba",
    ]
)
"""Model types in which the documents of a packed row see each other; used where no small model can be made of a config.

Found with transformers 5.24 from small models of every type's default config; the last six, from `bailing_hybrid` on,
are listed for their recurrent layers.
"""

OTHER_LOGITS_TYPES = frozenset(["prophetnet"])
"""Model types whose logits are not made from the last hidden states, and of which no small model can be made."""

MAX_PARAMETERS = 150_000_000
"""Largest number of parameters of the small model: some configs have no widths that can be divided."""
VOCABULARY = 128
LENGTH = 8
"""Tokens of a document in the probe."""
WIDTH = re.compile(
    r"hidden_size|heads(_|$)|n_head(_|$)|intermediate|ffn|ff_dim|d_model|d_ssm|n_embd|n_inner|embed_dim|proj_dim|lru_width"
)
"""Keys of a config that are divided by one number, so that an attention head keeps its number of channels."""


@final
@dataclass(frozen=True)
class Behaviour:
    """What a model was found to do.

    Attributes:
        is_causal: no token sees later tokens.
        separates: where position ids start again at 0, a token does not see the tokens before that place.
        has_known_logits: the logits are those of the output layer on the last hidden states, scaled and capped as
            `ModelSpec.logit_change` says.
    """

    is_causal: bool
    separates: bool
    has_known_logits: bool


def check_behaviour(spec: ModelSpec, origin: str, packs: bool) -> None:
    """Raises UserError for a model that does not fit this task's loss or batches. The message begins with `origin`.

    Args:
        packs: whether rows hold several documents.
    """
    kind, behaviour = spec.config.model_type, observe(spec)
    keys = " ".join(f"{key} {value}" for key, value in suspicious_keys(spec.config).items())
    if behaviour is None:
        separates = kind not in TYPES_MIXING_PACKED_DOCUMENTS
        if kind in OTHER_LOGITS_TYPES:
            raise UserError(f"{origin}: model type {kind} makes its logits of other hidden states; give another model")
        if keys and spec.logit_change.is_plain:
            raise UserError(
                f"{origin}: what model type {kind} does to its logits by {keys} of its config is not known, and no "
                "small model can be made of it that would show it; give another model"
            )
    else:
        separates = behaviour.separates
        if not behaviour.has_known_logits:
            raise UserError(
                f"{origin}: model type {kind} changes its logits behind the output layer, or its hidden states before "
                f"it, in a way that this task does not know{f' ({keys} in its config)' if keys else ''}; give another "
                "model"
            )
        if not behaviour.is_causal:
            raise UserError(
                f"{origin}: by its config, model type {kind} lets a token see those that follow it, so nothing is "
                "left to predict; give a causal model"
            )
    if packs and not separates:
        raise UserError(
            f"{origin}: in model type {kind} the documents of a packed row would see each other; set data.packing=false"
        )


def observe(spec: ModelSpec) -> Behaviour | None:
    """Runs a small model on the CPU in float32. None where none can be made, or its outputs do not show the behaviour.

    torch's random state on the CPU is restored afterwards.
    """
    try:
        with rng.seeded(0), torch.no_grad(), torch.device("cpu"):
            return _observe(small_config(spec), spec.trusts_code)
    except Exception:
        # A reduced config may contradict itself, for which each model class raises errors of its own types.
        return None


def small_config(spec: ModelSpec) -> Any:
    """A copy of the config with fewer blocks (one of each kind or more), widths divided by up to 16, and few ids."""
    config, num_blocks = copy.deepcopy(spec.config), spec.num_blocks_of_all_kinds
    values = config.to_dict()
    keep_layers(config, range(num_blocks), spec.num_blocks)
    widths = {key: value for key, value in values.items() if type(value) is int and value > 1 and WIDTH.search(key)}
    divisor = next(factor for factor in (16, 8, 4, 2, 1) if all(value % factor == 0 for value in widths.values()))
    for key, value in widths.items():
        setattr(config, key, value // divisor)
    # In each of the groups that some routers choose among, at least as many experts as a token uses.
    chosen = [
        value
        for key, value in values.items()
        if re.search("experts_per_tok|top_?k$|moe_k$", key) and value in range(64)
    ]
    experts = max([2, *chosen]) * (values.get("n_group") or values.get("num_expert_group") or 1)
    for key, value in values.items():
        if re.search("(num_experts|local_experts|routed_experts)$", key) and type(value) is int:
            setattr(config, key, min(value, experts))
    config.vocab_size = min(config.vocab_size, VOCABULARY)
    for key, value in values.items():
        if key.endswith("token_id") and type(value) is int and value >= config.vocab_size:
            setattr(config, key, 0)
    return config


def _observe(config: Any, trusts_code: bool) -> Behaviour | None:
    """Runs rows of two documents, of which one is exchanged. None for a model that is too large or shows no effect."""
    with init_empty_weights():
        if new_model(config, trusts_code).num_parameters() > MAX_PARAMETERS:
            return None
    model = new_model(config, trusts_code).eval()
    for parameter in model.parameters():
        # Biases and gates of a new model are 0, so that their effect would not show.
        parameter.add_(0.05 * torch.randn_like(parameter))
    body, head = model.base_model, model.get_output_embeddings()
    first, other_first, second, other_second = torch.randint(config.vocab_size // 2, config.vocab_size, (4, LENGTH))
    ids = torch.stack([torch.cat(pair) for pair in ((first, second), (other_first, second), (first, other_second))])
    continued = torch.arange(2 * LENGTH).expand(3, -1)

    def hidden_of(positions: Tensor) -> Tensor:
        return body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state

    together, apart = hidden_of(continued), hidden_of(continued % LENGTH)
    has_known_logits = _has_known_logits(model, head(together), {"input_ids": ids, "position_ids": continued})
    # The effect of the first document on the second where the second sees it. Where it does not, only rounding is left.
    effect = _distance(together[0, LENGTH:], together[1, LENGTH:])
    if not (1e-5 < effect < float("inf")):
        return None
    return Behaviour(
        is_causal=_distance(together[0, :LENGTH], together[2, :LENGTH]) <= 1e-3 * effect,
        separates=_distance(apart[0, LENGTH:], apart[1, LENGTH:]) <= 1e-3 * effect,
        has_known_logits=has_known_logits,
    )


def _has_known_logits(model: Any, from_head: Tensor, inputs: dict[str, Tensor]) -> bool:
    """Whether the model's own forward pass changes the output layer's logits as `change_of` says.

    A new model has small logits, on which a cap has no visible effect. So the layer's output is multiplied: the largest
    scaled logit becomes three times the cap, or 100 without a cap.
    """
    change = change_of(model.config)
    largest = float(from_head.abs().max()) * abs(change.scale)
    factor = (100.0 if change.cap is None else 3 * change.cap) / max(largest, 1e-30)
    handle = model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, output: output * factor)
    try:
        logits = model(**inputs, use_cache=False).logits
    finally:
        handle.remove()
    expected = change.apply(from_head * factor)
    return logits.shape == expected.shape and _distance(logits, expected) <= 1e-3 * float(expected.abs().max())


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference."""
    return float((one - other).abs().max())
