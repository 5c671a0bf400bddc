"""Rotary positions of a GGUF file: their base, width and scaling, as transformers' `rope_parameters`.

llama.cpp stores linear and YaRN scaling as keys, Llama 3's as one factor for each frequency in the tensor
`rope_freqs.weight`, and LongRoPE's as the tensors `rope_factors_long.weight` and `rope_factors_short.weight`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from distiller.errors import UserError

LLAMA3_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTOR_TENSORS = (LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Names of the tensors with factors of rotary frequencies."""

ROPE_KEYS = frozenset(
    [
        *("rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scale_linear"),
        *(f"rope.scaling.{key}" for key in ("type", "factor", "attn_factor", "original_context_length", "finetuned")),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    ]
)
"""Keys that are applied or compared here. `apply_metadata` refuses others unless transformers' reader applies them."""

LLAMA3_DEFAULTS = (1.0, 4.0, 8192)
"""Low and high frequency factor and original length of every Llama 3 model that Meta published."""


def apply_rope(
    config: Any,
    values: Mapping[str, Any],
    factors: Mapping[str, Any],
    known: Collection[str],
    origin: str,
    prefix: str,
) -> None:
    """Sets `config.rope_parameters` to the values in the file.

    Args:
        config: a config of transformers, changed in place.
        values: the values of the architecture's keys; keys are without `prefix`.
        factors: the tensors of `FACTOR_TENSORS` that the file has, float32 arrays, one entry per frequency.
        known: keys, without `prefix`, that transformers' reader has applied.
        origin: the file's name, with which messages begin.
        prefix: the architecture's prefix of keys, such as `llama.`.

    Raises:
        UserError: transformers' model has no such rotary positions.
    """
    if getattr(config, "rope_parameters", None) is None:
        if unused_keys := sorted(
            key for key in values if key in ROPE_KEYS and key != "rope.dimension_count" and key not in known
        ):
            raise UserError(
                f"{origin}: its key {prefix}{unused_keys[0]} is of rotary positions, which its model has not"
            )
        return
    _check_width(config, values, known, origin, prefix)
    # One dictionary for the whole model, or one for each layer type. Layers of sliding attention are never scaled.
    parameters = config.rope_parameters
    full = parameters.get("full_attention", parameters)
    if "rope.freq_base" in values:
        full["rope_theta"] = float(values["rope.freq_base"])
    if "rope.freq_base_swa" in values:
        if "sliding_attention" not in parameters:
            raise UserError(f"{origin}: {prefix}rope.freq_base_swa is of layers that its model has not")
        parameters["sliding_attention"]["rope_theta"] = float(values["rope.freq_base_swa"])
    scaling = _scaling(config, values, factors, origin, prefix)
    if scaling:
        full.update(scaling)
    if LLAMA3_FACTORS in factors and np.any(factors[LLAMA3_FACTORS] != 1):
        if scaling:
            raise UserError(f"{origin}: has both {prefix}rope.scaling.type and {LLAMA3_FACTORS}; transformers has one")
        full.update(_llama3(np.asarray(factors[LLAMA3_FACTORS], np.float64), full["rope_theta"], origin))


def _check_width(config: Any, values: Mapping[str, Any], known: Collection[str], origin: str, prefix: str) -> None:
    """Sets `partial_rotary_factor` where the file rotates another number of a head's channels than the config.

    Raises UserError where the config has no such attribute.
    """
    wanted = values.get("rope.dimension_count")
    if wanted is None or "rope.dimension_count" in known:
        return
    head_dim = getattr(config, "head_dim", None) or values.get("attention.key_length")
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    parameters = config.rope_parameters
    share = parameters.get("full_attention", parameters).get("partial_rotary_factor")
    share = share or getattr(config, "partial_rotary_factor", None) or 1.0
    if int(head_dim * share) == wanted:
        return
    if share == 1.0 and wanted == values.get("attention.key_length"):
        return
    if hasattr(config, "partial_rotary_factor") or "partial_rotary_factor" in parameters:
        parameters["partial_rotary_factor"] = wanted / head_dim
        return
    raise UserError(
        f"{origin}: by its key {prefix}rope.dimension_count {wanted} of {head_dim} channels of a head are turned, and "
        f"transformers' {type(config).__name__} turns {int(head_dim * share)}; give the model's folder of transformers"
    )


def _scaling(
    config: Any, values: Mapping[str, Any], factors: Mapping[str, Any], origin: str, prefix: str
) -> dict[str, Any]:
    """The entries of `rope_parameters` for `rope.scaling.*` and LongRoPE; empty without scaling. Raises UserError."""
    kind = values.get("rope.scaling.type")
    factor = float(values.get("rope.scaling.factor") or values.get("rope.scale_linear") or 1.0)
    original = values.get("rope.scaling.original_context_length")
    attention = float(values.get("rope.scaling.attn_factor") or 1.0)
    if LONG_FACTORS in factors or SHORT_FACTORS in factors:
        if not (LONG_FACTORS in factors and SHORT_FACTORS in factors and original):
            raise UserError(
                f"{origin}: has one of {LONG_FACTORS}, {SHORT_FACTORS} and {prefix}rope.scaling."
                "original_context_length, and not all three; convert the model again"
            )
        config.original_max_position_embeddings = int(original)
        return {
            "rope_type": "longrope",
            "long_factor": [float(f"{value:.7g}") for value in factors[LONG_FACTORS]],
            "short_factor": [float(f"{value:.7g}") for value in factors[SHORT_FACTORS]],
            "factor": config.max_position_embeddings / int(original),
            "attention_factor": attention,
            "original_max_position_embeddings": int(original),
        }
    # Without a type, llama.cpp reads a factor as linear scaling.
    if kind == "none" or (kind in (None, "linear") and factor == 1.0):
        if attention != 1.0:
            raise UserError(f"{origin}: its key {prefix}rope.scaling.attn_factor ({attention:g}) has no place here")
        return {}
    if attention != 1.0:
        raise UserError(
            f"{origin}: its key {prefix}rope.scaling.attn_factor ({attention:g}) beside {prefix}rope.scaling.type "
            f"{kind} is read differently from version to version; give the model's folder of transformers"
        )
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": int(original or config.max_position_embeddings),
            "beta_fast": float(values.get("rope.scaling.yarn_beta_fast") or 32.0),
            "beta_slow": float(values.get("rope.scaling.yarn_beta_slow") or 1.0),
        }
    raise UserError(
        f"{origin}: its key {prefix}rope.scaling.type is {kind}, which is not read (linear, yarn and none are); give "
        "the model's folder of transformers"
    )


def _llama3(factors: np.ndarray, theta: float, origin: str) -> dict[str, Any]:
    """The entries of `rope_parameters` for Llama 3's scaling that give these factors.

    A file holds only the factors. The published models' parameters are tried first, then a fit.

    Args:
        factors: float64 array of what each rotary frequency is divided by.
        theta: base of the rotary frequencies.
        origin: the file's name, with which messages begin.

    Raises:
        UserError: no parameters give these factors.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(len(factors)) / len(factors))
    largest = float(f"{factors.max():.6g}")
    candidates = [LLAMA3_DEFAULTS]
    between = (factors > 1.0001) & (factors < largest * 0.9999)
    if between.sum() >= 2 and largest > 1:
        # Between the two ends the inverse factor is linear in the frequency.
        smooth = (1 / factors[between] - 1 / largest) / (1 - 1 / largest)
        slope, offset = np.polyfit(1 / wavelengths[between], smooth, 1)
        # Low factor, high factor and original length may be scaled together without effect. The low factor is set to
        # 1, as in every published model.
        if offset < 0 < slope:
            candidates.append((1.0, (1 - offset) / -offset, round(slope / -offset)))
    for low, high, original in candidates:
        if np.allclose(_llama3_factors(wavelengths, largest, low, high, original), factors, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": low,
                "high_freq_factor": float(high),
                "original_max_position_embeddings": int(original),
            }
    raise UserError(
        f"{origin}: the factors of its tensor {LLAMA3_FACTORS} are not those of Llama 3's scaling, the only one that "
        "transformers has for them; give the model's folder of transformers"
    )


def _llama3_factors(wavelengths: np.ndarray, factor: float, low: float, high: float, original: float) -> np.ndarray:
    """What Llama 3's scaling divides each rotary frequency by; wavelengths and original length in tokens.

    The formula is that of `_compute_llama3_parameters` in transformers' modeling_rope_utils.py.
    """
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
