"""Linear layers with int8 weights and activations."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import final

import torch
from torch import Tensor

from distiller.teachers.quantization.layers import QuantizedLinear

_kernel: Callable[..., Tensor] | None = None
if find_spec("triton") is not None:
    # torch for CPUs alone comes without it.
    from distiller.teachers.quantization.int8_kernel import int8_product

    _kernel = int8_product

MAX_INT8 = 127


@final
class Int8Linear(QuantizedLinear):
    """`quantized_weight` [out, in] int8, `weight_scales` [out] float32; W is one times the other, by rows.

    Each row of the input gets a scale of its own, its largest absolute value / 127, and becomes int8 too. Products are
    accumulated in int32, exactly, scaled in float32 and rounded once. A row that holds inf or NaN gives no finite
    number.
    """

    @staticmethod
    def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
        quantized, scales = _by_rows(weight)
        return quantized, scales[:, 0]

    @staticmethod
    def accepts(size: torch.Size) -> bool:
        del size
        return True

    def forward(self, x: Tensor) -> Tensor:
        shape = *x.shape[:-1], self.out_features
        if x.numel() == 0:
            return x.new_empty(shape)
        # A view may have other strides than the kernel expects: that of a permuted picture with a batch of 1.
        rows, scales = _by_rows(x.reshape(-1, x.shape[-1]).contiguous())
        if x.is_cuda:
            if _kernel is None:
                raise RuntimeError("Triton is not installed")
            result = _kernel(rows, self.quantized_weight, scales, self.weight_scales, self.bias, x.dtype)
        else:
            sums = torch._int_mm(rows, self.quantized_weight.t())
            result = sums * scales * self.weight_scales
            result = (result if self.bias is None else result + self.bias).to(x.dtype)
        return result.view(shape)


def _by_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """([n, m] int8, its scales [n, 1] float32) of [n, m] in any floating dtype."""
    rows = rows.float()
    # The smallest normal number keeps a row of zeros from a division by zero.
    scales = rows.abs().amax(1, keepdim=True).div(MAX_INT8).clamp(min=torch.finfo(torch.float32).tiny)
    return (rows / scales).round().to(torch.int8), scales
