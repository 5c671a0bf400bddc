"""The blocks of a classifier and the shapes of their outputs, found by running it on the meta device.

There is no table of architectures: transformers keeps repeated layers in lists, and a forward pass on the meta device
shows which of them run one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from distiller.vision.library import new_model


@dataclass(frozen=True)
class Structure:
    """A classifier without weights.

    Attributes:
        block_names: names of the submodules that run one after the other, in that order; empty where there are none.
        block_classes: names of the blocks' classes, each once.
        block_shapes: output shape of each block for one picture, without the batch: (C, H, W) or (tokens, dim).
        num_logits: number of classes.
        num_parameters: of the whole model.
        can_recompute: whether transformers offers activation checkpointing for the model.
    """

    block_names: tuple[str, ...]
    block_classes: tuple[str, ...]
    block_shapes: tuple[tuple[int, ...], ...]
    num_logits: int
    num_parameters: int
    can_recompute: bool


def inspect_model(config: PretrainedConfig, picture_shape: tuple[int, int, int]) -> Structure:
    """Runs one picture of shape (C, H, W) through the model of this config, on the meta device.

    Raises whatever the library raises where the config is no classifier's or the picture does not fit.
    """
    with torch.device("meta"):
        model = new_model(config).eval()
        picture = torch.empty(1, *picture_shape)
    candidates = _repeated_layers(model)
    order: list[str] = []
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str):
        def hook(module: nn.Module, args: object, output: Any) -> None:
            order.append(name)
            shapes[name] = tuple(first_tensor(output).shape[1:])

        return hook

    handles = [model.get_submodule(name).register_forward_hook(note(name)) for name in candidates]
    with torch.no_grad():
        logits = model(pixel_values=picture).logits
    for handle in handles:
        handle.remove()
    # Layers cannot be streamed where one runs twice or not at all: the model then has no blocks and is one unit.
    names = tuple(order) if sorted(order) == sorted(candidates) else ()
    classes = dict.fromkeys(type(model.get_submodule(name)).__name__ for name in names)
    return Structure(
        block_names=names,
        block_classes=tuple(classes),
        block_shapes=tuple(shapes[name] for name in names),
        num_logits=logits.shape[-1],
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        can_recompute=bool(model.supports_gradient_checkpointing),
    )


def first_tensor(output: Any) -> Tensor:
    """A block's hidden state: its output, or the first item of it."""
    return output if isinstance(output, Tensor) else output[0]


def _repeated_layers(model: nn.Module) -> list[str]:
    """Names of the layers in the model's outermost lists. An item that is a stage is replaced by its layers."""
    found: list[str] = []
    for name, module in _outermost_lists(model, ""):
        for index, child in module.named_children():
            path = f"{name}.{index}"
            inner = [part for part in _outermost_lists(child, path) if _holds_most(part[1], child)]
            # A list with most of an item's parameters holds a stage's layers (ResNet). The convolutions of one block
            # are no such layers: their list has modules of several classes, or of activations.
            layers = (
                [f"{inner[0][0]}.{layer_index}" for layer_index, _ in inner[0][1].named_children()] if inner else []
            )
            found += layers if layers and _is_stage(inner[0][1]) else [path]
    return found


def _outermost_lists(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """(path, module) of the outermost lists of layers; `prefix` is the path of `module`."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        is_list = isinstance(child, nn.ModuleList) or (isinstance(child, nn.Sequential) and name in _LAYER_LISTS)
        found += [(path, child)] if is_list else _outermost_lists(child, path)
    return found


_LAYER_LISTS = ("layers", "blocks")
"""Names of those `nn.Sequential` modules that hold a stage's layers; others hold heads and branches."""


def _is_stage(layers: nn.Module) -> bool:
    """Whether all layers have the same class."""
    kinds: Sequence[type] = [type(child) for child in layers.children()]
    return len(set(kinds)) == 1


def _holds_most(part: nn.Module, whole: nn.Module) -> bool:
    """Whether `part` has more than half of the parameters of `whole`."""
    size = sum(parameter.numel() for parameter in whole.parameters())
    return 2 * sum(parameter.numel() for parameter in part.parameters()) > size
