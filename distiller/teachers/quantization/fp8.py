"""Linear layers with fp8 weights and activations."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from distiller.teachers.quantization.layers import QuantizedLinear

DTYPE = torch.float8_e4m3fn
MAX_FP8 = torch.finfo(DTYPE).max
ALIGNMENT = 16
"""Both sizes of a weight must be multiples of it: the GPU's fp8 products take no others."""


@final
class Fp8Linear(QuantizedLinear):
    """`quantized_weight` [out, in] float8_e4m3fn, `weight_scales` [out] float32; W is one times the other, by rows.

    Each row of the input gets a scale of its own, its largest absolute value / 448, and becomes fp8 too. Products are
    accumulated in float32 (on Hopper by its faster, less exact way), and the result is rounded to bfloat16. A row that
    holds inf or NaN gives NaN.
    """

    @staticmethod
    def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
        quantized, scales = _by_rows(weight)
        return quantized, scales[:, 0]

    @staticmethod
    def accepts(size: torch.Size) -> bool:
        return size[0] % ALIGNMENT == 0 and size[1] % ALIGNMENT == 0

    def forward(self, x: Tensor) -> Tensor:
        shape = *x.shape[:-1], self.out_features
        if x.numel() == 0:
            return x.new_empty(shape)
        # A view may have other strides than the product takes: that of a permuted picture with a batch of 1.
        rows, scales = _by_rows(x.reshape(-1, x.shape[-1]).contiguous())
        # Not torch.nn.functional.scaled_mm: torch 2.11 cannot compile it, and the block would be cut in pieces.
        result = torch._scaled_mm(
            rows,
            self.quantized_weight.t(),
            scale_a=scales,
            scale_b=self.weight_scales[None],
            bias=None if self.bias is None else self.bias.to(torch.bfloat16),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return result.to(x.dtype).view(shape)


def _by_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """([n, m] float8_e4m3fn, its scales [n, 1] float32) of [n, m] in any floating dtype."""
    rows = rows.float()
    # The smallest normal number keeps a row of zeros from a division by zero.
    scales = rows.abs().amax(1, keepdim=True).div(MAX_FP8).clamp(min=torch.finfo(torch.float32).tiny)
    return (rows / scales).to(DTYPE), scales
