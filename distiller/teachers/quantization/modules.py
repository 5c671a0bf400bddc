"""Modules without weights whose linear layers are quantised, and files that read as if they held such weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import torch
from torch import Tensor, nn

from distiller.errors import UserError
from distiller.launch.block_compilation import LOOPS
from distiller.storage.weight_files import WeightFiles
from distiller.teachers.base import Network, Setup
from distiller.teachers.quantization.files import QuantizedFiles
from distiller.teachers.quantization.layers import QuantizedLinear, layer_class, why_not_on
from distiller.teachers.quantization.stored import store_quantized
from distiller.teachers.weights.layout import lay_out
from distiller.teachers.weights.loading import ModulePlan, plan_modules

SMALL_SHARE = 0.5
"""Of the teacher's bytes: where less is quantised, it is said."""


def plan_quantized_modules(
    network: Network, setup: Setup, is_reader: bool, *, reads_again: bool = False
) -> list[ModulePlan]:
    """As `plan_modules`, with linear layers quantised where the recipe says so. Communicates. Raises UserError.

    A weight is quantised while it is read, on the reader's device; the host holds one unquantised weight for each
    thread that reads. The same layers are converted as by diffusers: linear layers, except those that the library keeps
    in float32, those whose size the quantisation does not take, those that compute otherwise than `nn.Linear`, and
    those whose weights the module around them reads.

    `reads_again`: weights are read for every update, so quantised ones are written into files of their own first. Every
    rank is then a reader.
    """
    quantization = setup.options.quantization
    if quantization == "none":
        return plan_modules(network, setup, is_reader)
    setup.ranks.all_succeed(lambda: _check_device(setup))
    kind = layer_class(quantization)
    plans, num_bytes, converted_bytes = plan_modules(network, setup, is_reader), 0, 0
    for plan in plans:
        converted = convert_linears(plan.module, float32_names(network, plan.name), kind)
        for entry in (entry for unit in plan.units for entry in unit.entries):
            num_bytes += entry.num_bytes
            converted_bytes += 0 if converted.isdisjoint(entry.names) else entry.num_bytes
        plan.units = lay_out(plan.module, network.block_names(plan.name))
        if plan.files is None:
            continue
        files = QuantizedFiles(plan.files, converted, kind.quantize, setup.dtype, setup.ranks.device)
        # QuantizedFiles has those members of WeightFiles that reading needs.
        plan.files = store_quantized(network, plan, files, setup) if reads_again else cast(WeightFiles, files)
    if not converted_bytes:
        raise UserError(
            f"teacher.quantization is {quantization} and {network.origin} has no linear layer that it takes; leave "
            "quantization out"
        )
    if is_reader and setup.ranks.is_main and converted_bytes < SMALL_SHARE * num_bytes:
        print(
            f"note: {quantization} teacher: {converted_bytes / num_bytes:.0%} of its bytes are in linear layers that "
            "can be quantised; the rest (such as experts, embeddings and convolutions) stays as it is"
        )
    return plans


def convert_linears(module: nn.Module, kept: Collection[str], kind: type[QuantizedLinear]) -> set[str]:
    """Replaces linear layers by `kind` on the meta device, and returns the names of their weights.

    Args:
        module: without weights; shared layers and weights stay shared.
        kept: names of parameters that keep their dtype. So does a weight that a layer of another kind shares.
        kind: the class of the new layers.
    """
    left_alone = {id(child) for owner in module.modules() if _reads_weights(owner) for child in owner.modules()}
    # Parameter -> whether each layer that holds it can be replaced.
    can_replace: dict[int, set[bool]] = {}
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            is_plain = isinstance(child, nn.Linear) and type(child).forward is nn.Linear.forward
            can_replace.setdefault(id(parameter), set()).add(is_plain and id(child) not in left_alone)
    layers: dict[int, QuantizedLinear] = {}
    weights: dict[int, tuple[Tensor, Tensor]] = {}
    converted = set()
    for path, child in list(module.named_modules(remove_duplicate=False)):
        name = f"{path}.weight"
        if not isinstance(child, nn.Linear) or name in kept or can_replace[id(child.weight)] != {True}:
            continue
        if not kind.accepts(child.weight.shape):
            continue
        converted.add(name)
        if id(child) not in layers:
            if id(child.weight) not in weights:
                weights[id(child.weight)] = kind.quantize(torch.empty_like(child.weight, device="meta"))
            size, dtype = child.weight.shape, child.weight.dtype
            layers[id(child)] = kind(*weights[id(child.weight)], child.bias, size, dtype).eval()
        parent, _, attribute = path.rpartition(".")
        module.get_submodule(parent)._modules[attribute] = layers[id(child)]
    return converted


def _reads_weights(owner: nn.Module) -> bool:
    """Whether a module reads the weights of layers inside itself instead of calling these layers."""
    # The mixers of state space models (Mamba and others) have this parameter, and hand weights to fused kernels.
    is_state_space = "A_log" in owner._parameters or LOOPS.search(type(owner).__name__) is not None
    return isinstance(owner, nn.MultiheadAttention) or is_state_space


def float32_names(network: Network, name: str) -> set[str]:
    """Names of the parameters that the library keeps in float32 where the rest has 16 bits."""
    skeletons = (network.skeleton(name, dtype) for dtype in (torch.bfloat16, torch.float16))
    named = (pair for skeleton in skeletons for pair in skeleton.named_parameters(remove_duplicate=False))
    return {parameter_name for parameter_name, parameter in named if parameter.dtype == torch.float32}


def _check_device(setup: Setup) -> None:
    device = torch.device("cpu") if setup.options.placement == "cpu" else setup.ranks.device
    if why_not := why_not_on(setup.options.quantization, device):
        raise UserError(f"teacher.quantization is {setup.options.quantization} and {why_not}; choose another one")
