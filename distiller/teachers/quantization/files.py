"""Weight files that read as if they held quantised weights."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import final

import torch
from torch import Tensor

from distiller.storage.weight_files import StoredTensor, WeightFiles


@final
class QuantizedFiles:
    """Has `tensors`, `read` and `close` as WeightFiles. Safe to use from several threads."""

    def __init__(
        self,
        files: WeightFiles,
        converted: Collection[str],
        quantize: Callable[[Tensor], tuple[Tensor, Tensor]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`converted` weights are read as `dtype` and given to `quantize` on `device`."""
        self._files, self._quantize, self._dtype, self._device = files, quantize, dtype, device
        stored = [name for name in converted if name in files.tensors]
        self._weight_of_quantized = {_quantized_name(name): name for name in stored}
        self._weight_of_scales = {_scales_name(name): name for name in stored}
        # Scales are usually read soon after their weight, and are kept until then.
        self._scales: dict[str, Tensor] = {}
        self.tensors: dict[str, StoredTensor] = {n: t for n, t in files.tensors.items() if n not in stored}
        for names in (self._weight_of_quantized, self._weight_of_scales):
            self.tensors |= {name: files.tensors[weight] for name, weight in names.items()}

    def read(self, name: str, target: Tensor) -> None:
        """Reads a tensor into a contiguous CPU tensor. Converted weights and their scales are as `quantize` returns."""
        if name in self._weight_of_quantized:
            weight = self._weight_of_quantized[name]
            quantized, self._scales[_scales_name(weight)] = self._quantized(weight)
            target.copy_(quantized)
        elif name in self._weight_of_scales:
            scales = self._scales.pop(name, None)
            target.copy_(self._quantized(self._weight_of_scales[name])[1] if scales is None else scales)
        else:
            self._files.read(name, target)

    def close(self) -> None:
        """Closes the files."""
        self._files.close()
        self._scales.clear()

    def _quantized(self, name: str) -> tuple[Tensor, Tensor]:
        weight = torch.empty(self._files.tensors[name].shape, dtype=self._dtype)
        self._files.read(name, weight)
        return self._quantize(weight.to(self._device))


def _quantized_name(weight_name: str) -> str:
    return f"{weight_name.removesuffix('weight')}quantized_weight"


def _scales_name(weight_name: str) -> str:
    return f"{weight_name}_scales"
