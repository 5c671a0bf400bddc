"""What a classifier is made of, found by running it on the meta device: its blocks, and the shapes of what they give.

No table of architectures: the library keeps repeated layers in lists, and a pass over shapes alone shows which of them
run one after the other.
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
        block_names: the submodules that run one after the other, in that order; empty where the model has no such.
        block_classes: names of their classes.
        block_shapes: what each gives for one picture, without the batch's axis: (C, H, W) or (tokens, dim).
        num_logits: classes.
        num_parameters: of the whole model.
        can_recompute: whether the library offers activation checkpointing for it.
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
    # A layer that runs twice, or not at all, cannot be streamed by: then the model is one unit.
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
    """A block's hidden state: what it returns, or the first of what it returns."""
    return output if isinstance(output, Tensor) else output[0]


def _repeated_layers(model: nn.Module) -> list[str]:
    """Names of the layers in the outermost lists of the model; a stage that is itself a list's holder gives its own."""
    found: list[str] = []
    for name, module in _outermost_lists(model, ""):
        for number, child in module.named_children():
            path = f"{name}.{number}"
            inner = [part for part in _outermost_lists(child, path) if _holds_most(part[1], child)]
            # One list that holds most of a stage are the stage's layers (ResNet); a block's own convolutions are not
            # repeated: they differ in kind or are activations.
            layers = [f"{inner[0][0]}.{place}" for place, _ in inner[0][1].named_children()] if inner else []
            found += layers if layers and _is_stage(inner[0][1]) else [path]
    return found


def _outermost_lists(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        is_list = isinstance(child, nn.ModuleList) or (isinstance(child, nn.Sequential) and name in _LAYER_LISTS)
        found += [(path, child)] if is_list else _outermost_lists(child, path)
    return found


_LAYER_LISTS = ("layers", "blocks")
"""Names under which the library keeps a stage's layers in an `nn.Sequential`, which also holds heads and branches."""


def _is_stage(layers: nn.Module) -> bool:
    kinds: Sequence[type] = [type(child) for child in layers.children()]
    return len(set(kinds)) == 1


def _holds_most(part: nn.Module, whole: nn.Module) -> bool:
    size = sum(parameter.numel() for parameter in whole.parameters())
    return 2 * sum(parameter.numel() for parameter in part.parameters()) > size
