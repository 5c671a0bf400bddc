"""Linear layers with fp8 weights and activations."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from distiller.teachers.quantization.rowwise import RowwiseLinear

DTYPE = torch.float8_e4m3fn
ALIGNMENT = 16
"""Both sizes of a weight must be multiples of it: the GPU's fp8 products take no others."""


@final
class Fp8Linear(RowwiseLinear):
    """`RowwiseLinear` in float8_e4m3fn.

    Products are accumulated in float32 (on Hopper by its faster, less exact way), and the result is rounded to
    bfloat16. A row that holds inf or NaN gives NaN.
    """

    largest = torch.finfo(DTYPE).max

    @staticmethod
    def accepts(size: torch.Size) -> bool:
        return size[0] % ALIGNMENT == 0 and size[1] % ALIGNMENT == 0

    @staticmethod
    def _rounded(scaled: Tensor) -> Tensor:
        return scaled.to(DTYPE)

    def _product(self, rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        # Not torch.nn.functional.scaled_mm: torch 2.11 cannot compile it, and the block would be cut in pieces.
        return torch._scaled_mm(
            rows,
            self.quantized_weight.t(),
            scale_a=scales,
            scale_b=self.weight_scales[None],
            bias=None if self.bias is None else self.bias.to(torch.bfloat16),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        ).to(dtype)
