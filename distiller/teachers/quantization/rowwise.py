"""Linear layers whose weights and activations have 8 bits, with a scale for each row."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from distiller.teachers.quantization.layers import QuantizedLinear


class RowwiseLinear(QuantizedLinear):
    """`quantized_weight` [out, in] in 8 bits, `weight_scales` [out] float32; W is one times the other, by rows.

    Each row of the input gets a scale of its own, its largest absolute value / `largest`, and becomes 8 bits too.
    """

    largest: ClassVar[float]
    """Of the 8-bit type."""

    @classmethod
    def quantize(cls, weight: Tensor) -> tuple[Tensor, Tensor]:
        quantized, scales = cls._by_rows(weight)
        return quantized, scales[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        shape = *x.shape[:-1], self.out_features
        if x.numel() == 0:
            return x.new_empty(shape)
        # A view may have other strides than kernels expect: that of a permuted picture with a batch of 1.
        rows, scales = self._by_rows(x.reshape(-1, x.shape[-1]).contiguous())
        return self._product(rows, scales, x.dtype).view(shape)

    @classmethod
    def _by_rows(cls, rows: Tensor) -> tuple[Tensor, Tensor]:
        """([n, m] in 8 bits, its scales [n, 1] float32) of [n, m] in any floating dtype."""
        rows = rows.float()
        # The smallest normal number keeps a row of zeros from a division by zero.
        scales = rows.abs().amax(1, keepdim=True).div(cls.largest).clamp(min=torch.finfo(torch.float32).tiny)
        return cls._rounded(rows / scales), scales

    @staticmethod
    @abstractmethod
    def _rounded(scaled: Tensor) -> Tensor:
        """float32 of at most `largest`, rounded to the 8-bit type."""

    @abstractmethod
    def _product(self, rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """[n, out] in `dtype`, with the bias: of contiguous rows [n, in] in 8 bits and their scales [n, 1]; n > 0."""
