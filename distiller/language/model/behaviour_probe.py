"""A small random model of a config's kind shows, on the CPU and before any weight is read, what its code does."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any, final

import torch
from accelerate import init_empty_weights
from torch import Tensor

from distiller.errors import UserError
from distiller.language.model.layer_subset import keep_layers
from distiller.language.model.logits import change_of, suspicious_keys
from distiller.language.model.spec import ModelSpec, new_model

JOINING_TYPES = frozenset(
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
"""Model types whose documents see each other in a packed row, for configs of which no small model can be made.

Found with transformers 5.24 by small models of every type's default config; the last line by their recurrent layers.
"""

OTHER_LOGITS_TYPES = frozenset(["prophetnet"])
"""Model types whose logits are not those of the last hidden states, and of which no small model can be made."""

MOST_PARAMETERS = 150_000_000
"""Of the small model: some configs have no width that can be divided."""
VOCABULARY = 128
LENGTH = 8
"""Tokens of a document."""
WIDTH = re.compile(
    r"hidden_size|heads(_|$)|n_head(_|$)|intermediate|ffn|ff_dim|d_model|d_ssm|n_embd|n_inner|embed_dim|proj_dim|lru_width"
)
"""Keys of a config which are divided together, so that a head keeps its channels."""


@final
@dataclass(frozen=True)
class Behaviour:
    """What a model does.

    Attributes:
        is_causal: no token sees those behind it.
        separates: positions that begin again at 0 hide from a token what stands before them.
        has_known_logits: they are what the output layer makes of the last hidden states, scaled and capped as
            `Anatomy.logit_change` says.
    """

    is_causal: bool
    separates: bool
    has_known_logits: bool


def check_behaviour(anatomy: ModelSpec, origin: str, packs: bool) -> None:
    """Raises UserError, which `origin` begins, for a model that this task's loss or batches do not fit.

    Args:
        packs: whether rows hold several documents.
    """
    kind, behaviour = anatomy.config.model_type, observe(anatomy)
    keys = " ".join(f"{key} {value}" for key, value in suspicious_keys(anatomy.config).items())
    if behaviour is None:
        separates = kind not in JOINING_TYPES
        if kind in OTHER_LOGITS_TYPES:
            raise UserError(f"{origin}: model type {kind} makes its logits of other hidden states; give another model")
        if keys and anatomy.logit_change.is_plain:
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


def observe(anatomy: ModelSpec) -> Behaviour | None:
    """Runs the small model, on the CPU in float32; None where there is none. The random state is left as it was."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            torch.manual_seed(0)
            return _observe(small_config(anatomy), anatomy.trusts_code)
    except Exception:
        # A config may contradict itself once it is cut, and each of the library's models says so in its own way.
        return None


def small_config(anatomy: ModelSpec) -> Any:
    """The config with fewer blocks, at least one of each kind, a fraction of the widths, and few tokens."""
    config, num_blocks = copy.deepcopy(anatomy.config), anatomy.num_blocks_of_all_kinds
    values = config.to_dict()
    keep_layers(config, range(num_blocks), anatomy.num_blocks)
    widths = {key: value for key, value in values.items() if type(value) is int and value > 1 and WIDTH.search(key)}
    divisor = next(number for number in (16, 8, 4, 2, 1) if all(value % number == 0 for value in widths.values()))
    for key, value in widths.items():
        setattr(config, key, value // divisor)
    # A token's experts exist, and as many in each of the groups that some routers choose among.
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
    with init_empty_weights():
        if new_model(config, trusts_code).num_parameters() > MOST_PARAMETERS:
            return None
    model = new_model(config, trusts_code).eval()
    for parameter in model.parameters():
        # New biases and gates are zero, which would hide what they do.
        parameter.add_(0.05 * torch.randn_like(parameter))
    body, head = model.base_model, model.get_output_embeddings()
    one, other, third, fourth = torch.randint(config.vocab_size // 2, config.vocab_size, (4, LENGTH))
    ids = torch.stack([torch.cat(pair) for pair in ((one, third), (other, third), (one, fourth))])
    through = torch.arange(2 * LENGTH).expand(3, -1)

    def hidden_of(positions: Tensor) -> Tensor:
        return body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state

    as_one, apart = hidden_of(through), hidden_of(through % LENGTH)
    has_known_logits = _has_known_logits(model, head(as_one), {"input_ids": ids, "position_ids": through})
    # How far the first document moves the second where it is to be seen: what hides it leaves nothing but rounding.
    effect = _distance(as_one[0, LENGTH:], as_one[1, LENGTH:])
    if not (1e-5 < effect < float("inf")):
        return None
    return Behaviour(
        is_causal=_distance(as_one[0, :LENGTH], as_one[2, :LENGTH]) <= 1e-3 * effect,
        separates=_distance(apart[0, LENGTH:], apart[1, LENGTH:]) <= 1e-3 * effect,
        has_known_logits=has_known_logits,
    )


def _has_known_logits(model: Any, from_head: Tensor, inputs: dict[str, Tensor]) -> bool:
    """Whether the model's own forward pass makes of the output layer's logits what `change_of` says of its config.

    New models have small logits, on which no cap shows: the layer's output is multiplied until it reaches three times
    the cap, or 100.
    """
    change = change_of(model.config)
    largest = float(from_head.abs().max()) * abs(change.scale)
    amplifies = (100.0 if change.cap is None else 3 * change.cap) / max(largest, 1e-30)
    handle = model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, output: output * amplifies)
    try:
        logits = model(**inputs, use_cache=False).logits
    finally:
        handle.remove()
    expected = change.apply(from_head * amplifies)
    return logits.shape == expected.shape and _distance(logits, expected) <= 1e-3 * float(expected.abs().max())


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
