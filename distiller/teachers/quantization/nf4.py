"""Linear layers with 4-bit weights, by bitsandbytes' functions (QLoRA, https://arxiv.org/abs/2305.14314).

Importing this module imports bitsandbytes.
"""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
from __future__ import annotations

from typing import final

import bitsandbytes as _bitsandbytes  # registers torch.ops.bitsandbytes
import torch
import torch.nn.functional as F
from torch import Tensor

from distiller.teachers.quantization.layers import QuantizedLinear

BLOCK_SIZE = 64
"""Numbers that share a scale; bitsandbytes' default."""

del _bitsandbytes


@final
class Nf4Linear(QuantizedLinear):
    """`quantized_weight` [out * in / 2, 1] uint8, two 4-bit codes in each; `weight_scales` [out * in / 64] float32.

    The weight is converted to the input's dtype for each product. Computes what `bitsandbytes.nn.Linear4bit` with
    `quant_type="nf4"` does for several rows; of one row that layer computes the product without the conversion.
    """

    @classmethod
    def quantize(cls, weight: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.bitsandbytes.quantize_4bit(weight.reshape(-1, BLOCK_SIZE), BLOCK_SIZE, "nf4", torch.uint8)

    @staticmethod
    def accepts(size: torch.Size) -> bool:
        return size.numel() % BLOCK_SIZE == 0

    def forward(self, x: Tensor) -> Tensor:
        # One block a row: on a CPU bitsandbytes 0.50 gives wrong numbers for rows that are shorter than a block.
        blocks = torch.Size((self.size.numel() // BLOCK_SIZE, BLOCK_SIZE))
        weight = torch.ops.bitsandbytes.dequantize_4bit(
            self.quantized_weight, self.weight_scales, BLOCK_SIZE, "nf4", blocks, x.dtype
        )
        return F.linear(x, weight.view(self.size), None if self.bias is None else self.bias.to(x.dtype))
