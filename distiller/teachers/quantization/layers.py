"""The interface of quantised linear layers, and which class implements which `teacher.quantization`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module

import torch
from torch import Tensor, nn

LAYERS = {
    "int8": "distiller.teachers.quantization.int8:Int8Linear",
    "fp8": "distiller.teachers.quantization.fp8:Fp8Linear",
    "nf4": "distiller.teachers.quantization.nf4:Nf4Linear",
}
"""`teacher.quantization` -> "module:class", imported when it is used."""


class QuantizedLinear(nn.Module, ABC):
    """y = x W^T + b with a quantised W. Maps [..., in] to [..., out] in the input's dtype and on its device.

    All state is in `quantized_weight`, `weight_scales` and `bias`, which may be views of shared memory and may be
    replaced before each pass: placements copy, share and stream them as any other weights. The first two are buffers,
    since models take the dtype of their parameters for that of their activations. Each row of x is computed
    independently of the others. torch.compile takes the forward pass whole.
    """

    quantized_weight: Tensor
    weight_scales: Tensor

    def __init__(
        self,
        quantized_weight: Tensor,
        weight_scales: Tensor,
        bias: nn.Parameter | None,
        size: torch.Size,
        dtype: torch.dtype,
    ) -> None:
        """The first two as `quantize` returns them, bias [out]; size (out, in) and dtype of the unquantised weight."""
        super().__init__()
        self.register_buffer("quantized_weight", quantized_weight)
        self.register_buffer("weight_scales", weight_scales)
        self.bias, self.size, self.dtype = bias, size, dtype
        self.out_features, self.in_features = size

    @property
    def weight(self) -> Tensor:
        """[0], in the unquantised weight's dtype: models ask a layer's weight for its dtype and device."""
        return torch.empty(0, dtype=self.dtype, device=self.weight_scales.device)

    @classmethod
    @abstractmethod
    def quantize(cls, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(quantized_weight, weight_scales) of a floating-point weight [out, in], on its device, which may be meta."""

    @staticmethod
    @abstractmethod
    def accepts(size: torch.Size) -> bool:
        """Whether a weight of this size (out, in) can be quantised; others stay as they are."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """The product; see the class."""


def layer_class(quantization: str) -> type[QuantizedLinear]:
    """The class for a value of `teacher.quantization` other than `none`."""
    module, _, name = LAYERS[quantization].partition(":")
    return getattr(import_module(module), name)


def why_not_on(quantization: str, device: torch.device) -> str:
    """Why such layers cannot compute on the device; an empty text where they can. Tries a small one."""
    if quantization == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        return f"{name} has no fp8 products, which need compute capability 8.9 (Ada, Hopper or newer)"
    size = torch.Size((64, 64))
    try:
        kind = layer_class(quantization)
        layer = kind(*kind.quantize(torch.ones(size, device=device)), None, size, torch.bfloat16)
        with torch.no_grad():
            layer(torch.ones(1, 64, dtype=torch.bfloat16, device=device))
    except Exception as error:
        # Whatever compilers and libraries raise: all of it means that this machine cannot.
        why = next(iter(str(error).splitlines()), type(error).__name__)
        return f"torch {torch.__version__} cannot compute it on {device.type} here ({why})"
    return ""
