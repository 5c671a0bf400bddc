"""Linear layers with int8 weights and activations."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import final

import torch
from torch import Tensor

from distiller.teachers.quantization.rowwise import RowwiseLinear

_kernel: Callable[..., Tensor] | None = None
if find_spec("triton") is not None:
    # torch for CPUs alone comes without it.
    from distiller.teachers.quantization.int8_kernel import int8_product

    _kernel = int8_product


@final
class Int8Linear(RowwiseLinear):
    """`RowwiseLinear` in int8.

    Products are accumulated in int32, exactly, scaled in float32 and rounded once. A row that holds inf or NaN gives no
    finite number.
    """

    largest = 127

    @staticmethod
    def accepts(size: torch.Size) -> bool:
        del size
        return True

    @staticmethod
    def _rounded(scaled: Tensor) -> Tensor:
        return scaled.round().to(torch.int8)

    def _product(self, rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        if rows.is_cuda:
            if _kernel is None:
                raise RuntimeError("Triton is not installed")
            return _kernel(rows, self.quantized_weight, scales, self.weight_scales, self.bias, dtype)
        result = torch._int_mm(rows, self.quantized_weight.t()) * scales * self.weight_scales
        return (result if self.bias is None else result + self.bias).to(dtype)
