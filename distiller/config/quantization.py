"""The values of `teacher.quantization`. Imports no torch."""

from __future__ import annotations

from typing import Literal, get_args

Quantization = Literal["none", "int8", "fp8", "nf4"]

ARITHMETIC = {
    "none": "none",
    "int8": "int8 weights per output channel and activations per row, products accumulated in int32",
    "fp8": "float8_e4m3 weights per output channel and activations per row, products accumulated in float32",
    "nf4": "nf4 weights in blocks of 64, products in teacher.dtype",
}
"""Quantisation -> what is computed. Part of the key of caches and rollouts: outputs are equal where it is equal."""

NEEDS_BITSANDBYTES = ("nf4",)


def quantizations() -> tuple[str, ...]:
    """All values but `none`."""
    return tuple(name for name in get_args(Quantization) if name != "none")
