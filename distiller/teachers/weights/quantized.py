"""`teacher.quantization: int8`: linear layers become int8, and their weights are quantised while they are read."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast, final

import torch
from torch import Tensor, nn

from distiller.storage.weight_files import StoredTensor, WeightFiles
from distiller.teachers.base import Network, Setup
from distiller.teachers.weights.layout import lay_out
from distiller.teachers.weights.loading import ModulePlan, plan_modules


def plan_quantized_modules(network: Network, setup: Setup, is_reader: bool) -> list[ModulePlan]:
    """As `plan_modules`, with linear layers in int8 where the recipe says so. Communicates. Raises UserError.

    A weight is quantised while it is read, on the reader's device; the host holds one unquantised weight for each
    thread that reads. The same layers are converted as by diffusers: linear layers, except those that the library keeps
    in float32.
    """
    if setup.options.quantization == "none":
        return plan_modules(network, setup, is_reader)
    plans = plan_modules(network, setup, is_reader)
    for plan in plans:
        # Only a 16-bit skeleton shows which parameters the library keeps in float32.
        narrow = network.skeleton(plan.name, torch.bfloat16)
        parameters = narrow.named_parameters(remove_duplicate=False)
        islands = {name for name, parameter in parameters if parameter.dtype == torch.float32}
        converted = convert_linears(plan.module, islands)
        plan.units = lay_out(plan.module, network.block_names(plan.name))
        if plan.files is not None:
            # Int8Files has those members of WeightFiles that reading needs.
            plan.files = cast(WeightFiles, Int8Files(plan.files, converted, setup.dtype, setup.ranks.device))
    return plans


def convert_linears(module: nn.Module, islands: Collection[str]) -> set[str]:
    """Replaces linear layers by `Int8Linear` on the meta device, and returns the names of their weights.

    Args:
        module: without weights; shared layers and weights stay shared.
        islands: names of parameters that keep their dtype. So does a weight that a layer of another kind shares.
    """
    from distiller.teachers.weights.int8 import Int8Linear

    kinds: dict[int, set[bool]] = {}
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            kinds.setdefault(id(parameter), set()).add(isinstance(child, nn.Linear))
    layers: dict[int, Int8Linear] = {}
    weights: dict[int, tuple[nn.Parameter, Tensor]] = {}
    converted = set()
    for path, child in list(module.named_modules(remove_duplicate=False)):
        name = f"{path}.weight"
        if not isinstance(child, nn.Linear) or name in islands or kinds[id(child.weight)] != {True}:
            continue
        converted.add(name)
        if id(child) not in layers:
            if id(child.weight) not in weights:
                empty = torch.empty(child.weight.shape, dtype=torch.int8, device="meta")
                scales = torch.empty(child.out_features, dtype=torch.float32, device="meta")
                weights[id(child.weight)] = nn.Parameter(empty, requires_grad=False), scales
            layers[id(child)] = Int8Linear(*weights[id(child.weight)], child.bias).eval()
        parent, _, attribute = path.rpartition(".")
        module.get_submodule(parent)._modules[attribute] = layers[id(child)]
    return converted


@final
class Int8Files:
    """Reads weight files as if they stored int8 weights; has `tensors`, `read` and `close` as WeightFiles.

    Safe to use from several threads.
    """

    def __init__(
        self, files: WeightFiles, converted: Collection[str], dtype: torch.dtype, device: torch.device
    ) -> None:
        """`converted` weights are read as `dtype` and quantised on `device`."""
        self._files, self._converted, self._dtype, self._device = files, converted, dtype, device
        # Scales are usually read soon after their weight, and are kept until then.
        self._scales: dict[str, Tensor] = {}
        self.tensors: dict[str, StoredTensor] = dict(files.tensors)
        self.tensors |= {_scales_of(name): files.tensors[name] for name in converted if name in files.tensors}

    def read(self, name: str, target: Tensor) -> None:
        """Reads a tensor into a contiguous CPU tensor: int8 for a converted weight, float32 [out] for its scales."""
        if name in self._converted:
            quantized, self._scales[_scales_of(name)] = self._quantize(name)
            target.copy_(quantized)
        elif name in self.tensors and name not in self._files.tensors:
            scales = self._scales.pop(name, None)
            weight = name.removesuffix("_scales")
            target.copy_(self._quantize(weight)[1] if scales is None else scales)
        else:
            self._files.read(name, target)

    def close(self) -> None:
        """Closes the files."""
        self._files.close()
        self._scales.clear()

    def _quantize(self, name: str) -> tuple[Tensor, Tensor]:
        from distiller.teachers.weights.int8 import quantize

        weight = torch.empty(self._files.tensors[name].shape, dtype=self._dtype)
        self._files.read(name, weight)
        return quantize(weight.to(self._device))


def _scales_of(weight_name: str) -> str:
    return f"{weight_name}_scales"
