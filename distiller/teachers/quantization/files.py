"""Weight files that read as if they held quantised weights."""

from __future__ import annotations

from collections.abc import Callable, Collection
from threading import Lock
from typing import final

import torch
from torch import Tensor

from distiller.storage.weight_files import StoredTensor, WeightFiles

SLICE_NUMBERS = 4 * 2**20
"""Numbers of a weight that are quantised at a time: the temporary copies take about 50 MiB for each thread."""
ROWS_MULTIPLE = 64
"""Slices are whole rows, and so many of them that no block of 64 numbers, which share a scale, is cut."""


@final
class QuantizedFiles:
    """Has `tensors`, `read` and `close` as WeightFiles.

    Safe to use from several threads, each of which takes about 50 MiB of the device while it quantises.
    """

    def __init__(
        self,
        files: WeightFiles,
        converted: Collection[str],
        quantize: Callable[[Tensor], tuple[Tensor, Tensor]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`converted` weights are read as `dtype` and given to `quantize` on `device`, some rows at a time."""
        self._files, self._quantize, self._dtype, self._device = files, quantize, dtype, device
        stored = [name for name in converted if name in files.tensors]
        self._weight_of = {_quantized_name(name): name for name in stored} | {_scales_name(n): n for n in stored}
        self._locks = {name: Lock() for name in stored}
        # Weight -> those of its two tensors that have been made and not been read yet; on the CPU.
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self.tensors: dict[str, StoredTensor] = {n: t for n, t in files.tensors.items() if n not in self._locks}
        self.tensors |= {name: files.tensors[weight] for name, weight in self._weight_of.items()}

    def read(self, name: str, target: Tensor) -> None:
        """Reads a tensor into a contiguous CPU tensor. Converted weights and their scales are as `quantize` returns.

        Raises OSError as WeightFiles.
        """
        weight = self._weight_of.get(name)
        if weight is None:
            self._files.read(name, target)
            return
        # Another thread usually reads the other one of the two at the same time.
        with self._locks[weight]:
            waiting = self._waiting.pop(weight, {})
            if name not in waiting:
                waiting = self._quantized(weight)
            target.copy_(waiting.pop(name))
            if waiting:
                self._waiting[weight] = waiting

    def close(self) -> None:
        """Closes the files."""
        self._files.close()
        self._waiting.clear()

    def _quantized(self, name: str) -> dict[str, Tensor]:
        weight = torch.empty(self._files.tensors[name].shape, dtype=self._dtype)
        self._files.read(name, weight)
        num_rows = max(SLICE_NUMBERS // weight.shape[1] // ROWS_MULTIPLE, 1) * ROWS_MULTIPLE
        slices = []
        for rows in weight.split(num_rows):
            quantized, scales = self._quantize(rows.to(self._device))
            slices.append((quantized.cpu(), scales.cpu()))
        quantized, scales = (torch.cat(parts) for parts in zip(*slices, strict=True))
        return {_quantized_name(name): quantized, _scales_name(name): scales}


def _quantized_name(weight_name: str) -> str:
    return f"{weight_name.removesuffix('weight')}quantized_weight"


def _scales_name(weight_name: str) -> str:
    return f"{weight_name}_scales"
