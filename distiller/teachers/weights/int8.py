"""Linear layers with int8 weights, by bitsandbytes' functions (LLM.int8(), https://arxiv.org/abs/2208.07339).

Importing this module imports bitsandbytes.
"""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
from __future__ import annotations

import logging
from typing import final

import bitsandbytes
import torch
from torch import Tensor, nn

OUTLIER_THRESHOLD = 6.0
"""Columns of activations with larger absolute values are computed in the activations' dtype. diffusers' default."""

# bitsandbytes warns at every call that it computes in int8.
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


@final
class Int8Linear(nn.Module):
    """Computes what `bitsandbytes.nn.Linear8bitLt` does.

    All its state is in `weight` [out, in] int8, `weight_scales` [out] float32 and `bias` [out], so that these can be
    views of shared memory and can be replaced; bitsandbytes' own layer keeps copies beside its parameters. Constructed
    on the meta device. Maps [..., in] to [..., out] in the input's dtype: float32, bfloat16 or float16.
    """

    def __init__(self, weight: nn.Parameter, weight_scales: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.register_buffer("weight_scales", weight_scales)

    def forward(self, x: Tensor) -> Tensor:
        state = bitsandbytes.MatmulLtState()
        state.CB, state.SCB, state.threshold = self.weight.data, self.weight_scales, OUTLIER_THRESHOLD
        state.has_fp16_weights = state.is_training = False
        bias = None if self.bias is None else self.bias.to(x.dtype)
        rows = bitsandbytes.matmul(x.reshape(-1, x.shape[-1]), state.CB, bias=bias, state=state)
        return rows.view(*x.shape[:-1], -1)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [out, in], scales [out] float32) of a weight [out, in] in any dtype, on its device."""
    quantized, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.to(torch.float16))
    return quantized, scales
