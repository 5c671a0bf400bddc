"""From last hidden states to the logits that are compared: output layer, scale and soft cap, ids that tokens have."""

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


@final
@dataclass(frozen=True)
class LogitChange:
    """What a model does to the logits of its output layer: z becomes cap * tanh(scale * z / cap).

    Attributes:
        scale: positive.
        cap: positive; None = the scale alone.
    """

    scale: float = 1.0
    cap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether logits stay as the output layer gives them."""
        return self.scale == 1 and self.cap is None

    def apply(self, logits: Tensor) -> Tensor:
        """Of any shape and floating dtype: changed in float32, or, where nothing is to do, the same tensor."""
        if self.is_plain:
            return logits
        changed = logits.float() * self.scale
        return changed if self.cap is None else torch.tanh(changed / self.cap) * self.cap

    def slope(self, changed: Tensor) -> Tensor | float:
        """The derivative of what `apply` returned by what it was given, from what it returned."""
        return self.scale if self.cap is None else self.scale * (1 - (changed / self.cap).square())


PLAIN = LogitChange()
WIDTH_MULTIPLE = 64
"""128 bytes in 16 bits."""

CAPS = dict.fromkeys(
    (
        *("beam", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "inkling2_loop_text"),
        *("inkling2_text", "nanochat", "vaultgemma"),
    ),
    "final_logit_softcapping",
) | {"recurrent_gemma": "logits_soft_cap", "xlstm": "output_logit_soft_cap"}
"""Model types of transformers whose logits are capped softly, and the key of their config that says at what."""

FACTORS = dict.fromkeys(("cohere", "cohere2", "cohere2_moe", "cohere_compass_text"), "logit_scale") | {
    "falcon_h1": "lm_head_multiplier",
    "hyperclovax": "logits_scaling",
}
"""Those whose logits are multiplied, and by what."""

DIVISORS = dict.fromkeys(
    (
        *("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
        # These two divide the hidden states, before an output layer without a bias.
        *("minicpm3",),
    ),
    "logits_scaling",
) | {"inkling_text": "logits_mup_width_multiplier"}
"""Those whose logits are divided, and by what."""

SUSPECTS = (
    *("final_logit_softcapping", "logits_soft_cap", "logit_softcap", "output_logit_soft_cap", "softcap"),
    *("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"),
    *("logits_mup_width_multiplier", "dim_model_base"),
)
"""Keys of a config by which models, also those with code of their own, change what their output layer gives."""


def change_of(config: Any) -> LogitChange:
    """What the library's model of a config does to its logits; for model types that are not listed above, nothing.

    That it is so is seen by running a small model (`distiller.language.model.behaviour_probe`).

    Raises:
        UserError: a factor or divisor that is zero or no finite number, a cap that is not above zero.
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
    """Those of `SUSPECTS` that a config sets to anything that might change a logit."""
    found = {key: getattr(config, key, None) for key in SUSPECTS}
    return {key: value for key, value in found.items() if value not in (None, 1, 1.0)}


@final
@dataclass(frozen=True)
class TokenIds:
    """The ids that stand for a token; a model's output layer may have more.

    Attributes:
        size: they are below this.
        absent: those below it that stand for none.
    """

    size: int
    absent: tuple[int, ...] = ()

    @staticmethod
    def of(*tokenizers: Any, below: int | None = None) -> TokenIds:
        """The ids that any of these tokenizers of transformers has; with `below`, those that are less than it."""
        known = {number for tokenizer in tokenizers for number in tokenizer.get_vocab().values()}
        if below is not None:
            known = {number for number in known if number < below}
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

        The same tensor every time, which nobody changes: it is copied to the device once.
        """
        return _absence(self, device) if self.absent else None

    def unused(self, vocabulary: int) -> list[int]:
        """The ids of an output layer that stand for no token."""
        return [*self.absent, *range(self.size, vocabulary)]


@functools.lru_cache(maxsize=16)
def _absence(ids: TokenIds, device: torch.device) -> Tensor:
    # Also for what has a gradient, wherever it is asked for first.
    with torch.inference_mode(False):
        mask = torch.zeros(ids.size, dtype=torch.bool)
        mask[list(ids.absent)] = True
        return mask.to(device)


def product_width(num_ids: int, vocabulary: int) -> int:
    """Rows of an output layer for the logits of its first `num_ids` ids: a multiple of 64 where it has so many.

    The rows of the product then begin at addresses for which cuBLAS has its fast kernels; an odd width has none. The
    logits of what is beyond are cut off behind the product.
    """
    return min(vocabulary, (num_ids + WIDTH_MULTIPLE - 1) // WIDTH_MULTIPLE * WIDTH_MULTIPLE)


class Head(NamedTuple):
    """A model's output layer, in one floating dtype on one device."""

    weight: Tensor
    """[V, H]; V may be larger than `ids.size`."""

    bias: Tensor | None
    """[V]."""

    change: LogitChange = PLAIN
    ids: TokenIds | None = None
    """The ids that are compared and may be said; None = all."""

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [N, ids] of hidden states [N, H], which are cast to the layer's dtype; -inf at absent ids."""
        size = len(self.weight) if self.ids is None else self.ids.size
        width = product_width(size, len(self.weight))
        bias = None if self.bias is None else self.bias[:width]
        logits = F.linear(hidden.to(self.weight.dtype), self.weight[:width], bias)[:, :size]
        logits = self.change.apply(logits)
        return without_absent(logits, None if self.ids is None else self.ids.absence(logits.device))


def without_absent(logits: Tensor, absent: Tensor | None) -> Tensor:
    """Logits [N, V] with -inf where `absent` [V] is true; the same tensor where there is no `absent`."""
    return logits if absent is None else logits.masked_fill(absent, -torch.inf)
