"""The logits that are compared, from last hidden states: output layer, scale and soft cap, ids of tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from distiller.errors import UserError, shown
from distiller.tasks.gpu_kernels import is_planned


@final
@dataclass(frozen=True)
class LogitChange:
    """The change that a model applies to the logits z of its output layer: cap * tanh(scale * z / cap).

    Attributes:
        scale: finite and not 0.
        cap: positive; None = no cap, only scale * z.
    """

    scale: float = 1.0
    cap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether logits stay as the output layer gives them."""
        return self.scale == 1 and self.cap is None

    def apply(self, logits: Tensor) -> Tensor:
        """The changed logits in float32, or `logits` itself where nothing changes; any shape and floating dtype."""
        if self.is_plain:
            return logits
        changed = logits.float() * self.scale
        return changed if self.cap is None else torch.tanh(changed / self.cap) * self.cap

    def slope(self, changed: Tensor) -> Tensor | float:
        """The derivative of `apply` by its input, from its output `changed`: of the same shape, or one number."""
        return self.scale if self.cap is None else self.scale * (1 - (changed / self.cap).square())


PLAIN = LogitChange()
WIDTH_MULTIPLE = 64
"""Ids; 64 logits of 16 bits are 128 bytes. See `product_width`."""

CAPS = dict.fromkeys(
    (
        *("beam", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "inkling2_loop_text"),
        *("inkling2_text", "nanochat", "vaultgemma"),
    ),
    "final_logit_softcapping",
) | {"recurrent_gemma": "logits_soft_cap", "xlstm": "output_logit_soft_cap"}
"""Model type of transformers whose logits have a soft cap -> key of its config that holds the cap."""

FACTORS = dict.fromkeys(("cohere", "cohere2", "cohere2_moe", "cohere_compass_text"), "logit_scale") | {
    "falcon_h1": "lm_head_multiplier",
    "hyperclovax": "logits_scaling",
}
"""Model type whose logits are multiplied -> key of its config that holds the factor."""

DIVISORS = dict.fromkeys(
    (
        *("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
        # Divides the hidden states, before an output layer without a bias, which has the same effect.
        *("minicpm3",),
    ),
    "logits_scaling",
) | {"inkling_text": "logits_mup_width_multiplier"}
"""Model type whose logits are divided -> key of its config that holds the divisor."""

SUSPECTS = (
    *("final_logit_softcapping", "logits_soft_cap", "logit_softcap", "output_logit_soft_cap", "softcap"),
    *("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"),
    *("logits_mup_width_multiplier", "dim_model_base"),
)
"""Keys of a config by which models, also those with Python code of their own, change their output layer's logits."""


def change_of(config: Any) -> LogitChange:
    """The change that transformers' model of a config applies to its logits; none for model types not listed above.

    `distiller.language.model.behaviour_probe` compares this with what a small model does.

    Raises:
        UserError: a factor, divisor or cap is not a finite number, a factor or divisor is 0, or a cap is not above 0.
    """
    kind = config.model_type

    def value(keys: dict[str, str], rule: str, is_valid: Callable[[float], bool]) -> float | None:
        given = getattr(config, keys[kind], None) if kind in keys else None
        if given is None:
            return None
        if not isinstance(given, int | float) or not math.isfinite(given) or not is_valid(given):
            raise UserError(f"its config's {keys[kind]} is {shown(given)}; it must be a finite number {rule}")
        return float(given)

    factor, divisor = (value(keys, "other than 0", bool) for keys in (FACTORS, DIVISORS))
    cap = value(CAPS, "above 0", lambda given: given > 0)
    scale = 1.0 if factor is None else factor
    return LogitChange(scale if divisor is None else scale / divisor, cap)


def suspicious_keys(config: Any) -> dict[str, Any]:
    """Key -> value of those `SUSPECTS` that a config sets to a value that may change logits."""
    found = {key: getattr(config, key, None) for key in SUSPECTS}
    return {key: value for key, value in found.items() if value not in (None, 1, 1.0)}


@final
@dataclass(frozen=True)
class TokenIds:
    """The ids that stand for a token; a model's output layer may have more.

    Attributes:
        size: all of them are below this number.
        absent: the ids below `size` that stand for no token.
    """

    size: int
    absent: tuple[int, ...] = ()

    @staticmethod
    def of(*tokenizers: Any, below: int | None = None) -> TokenIds:
        """The ids that at least one of these tokenizers of transformers has; with `below`, only ids below it."""
        known = {token_id for tokenizer in tokenizers for token_id in tokenizer.get_vocab().values()}
        if below is not None:
            known = {token_id for token_id in known if token_id < below}
        size = max(known, default=-1) + 1
        return TokenIds(size, tuple(sorted(set(range(size)) - known)))

    @property
    def num_tokens(self) -> int:
        """How many ids stand for a token."""
        return self.size - len(self.absent)

    def num_unused(self, vocabulary: int) -> int:
        """How many of an output layer's ids stand for no token."""
        return max(vocabulary - self.size, 0) + len(self.absent)

    def absence(self, device: torch.device) -> Tensor | None:
        """[size] bool on the device, true where an id stands for no token; None where each stands for one.

        All calls return the same tensor, which is copied to the device once. It must not be changed.
        """
        if not self.absent:
            return None
        # A plan's tensors hold no data: nobody else may get them.
        return _absence.__wrapped__(self, device) if is_planned() else _absence(self, device)

    def unused(self, vocabulary: int) -> list[int]:
        """The ids of an output layer that stand for no token."""
        return [*self.absent, *range(self.size, vocabulary)]


@functools.lru_cache(maxsize=16)
def _absence(ids: TokenIds, device: torch.device) -> Tensor:
    # Autograd cannot use a tensor that was made in inference mode, in which the first call may be.
    with torch.inference_mode(False):
        mask = torch.zeros(ids.size, dtype=torch.bool)
        mask[list(ids.absent)] = True
        return mask.to(device)


def product_width(num_ids: int, vocabulary: int) -> int:
    """Number of an output layer's ids that are multiplied for the logits of its first `num_ids` ids.

    `num_ids` rounded up to a multiple of 64, but at most `vocabulary`. The rows of the product then begin at addresses
    for which cuBLAS has fast kernels; it has none for an odd width. Logits of further ids are cut off afterwards.
    """
    return min(vocabulary, (num_ids + WIDTH_MULTIPLE - 1) // WIDTH_MULTIPLE * WIDTH_MULTIPLE)


class Head(NamedTuple):
    """A model's output layer, in one floating dtype on one device."""

    weight: Tensor
    """[V, H]; V may be larger than `ids.size`."""

    bias: Tensor | None
    """[V]."""

    change: LogitChange = PLAIN
    """The scale and cap that the model applies to the layer's logits."""

    ids: TokenIds | None = None
    """The ids that are compared and may be generated; None = all."""

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [N, ids] of hidden states [N, H], which are cast to the layer's dtype; -inf at absent ids.

        In float32 where `change` has an effect, else in the layer's dtype.
        """
        size = len(self.weight) if self.ids is None else self.ids.size
        width = product_width(size, len(self.weight))
        bias = None if self.bias is None else self.bias[:width]
        logits = F.linear(hidden.to(self.weight.dtype), self.weight[:width], bias)[:, :size]
        logits = self.change.apply(logits)
        return without_absent(logits, None if self.ids is None else self.ids.absence(logits.device))


def without_absent(logits: Tensor, absent: Tensor | None) -> Tensor:
    """Logits [N, V] with -inf where `absent` [V] is true; the same tensor where there is no `absent`."""
    return logits if absent is None else logits.masked_fill(absent, -torch.inf)
