"""An image classifier as a `Network`: one module, pictures in, logits and block outputs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PretrainedConfig

from distiller.tasks.feature_capture import capture_outputs
from distiller.tasks.skeleton import cast_skeleton
from distiller.teachers.base import Call, Network, Outputs, Request
from distiller.vision.library import new_model
from distiller.vision.structure import Structure, first_tensor

LOGITS = "logits"
FEATURES = "features/"
MODULE = "classifier"


class ClassifierNetwork(Network):
    """A model of `AutoModelForImageClassification`.

    Request inputs: `pixels` [B, C, H, W] float32. Outputs: `logits` [B, classes] and `features/N`, the output of block
    N ([B, C, H, W] or [B, tokens, dim]); in the module's dtype.
    """

    def __init__(
        self, config: PretrainedConfig, structure: Structure, origin: str, files: Callable[[set[str]], list[Path]]
    ) -> None:
        """`files` returns complete local safetensors files that hold the tensors of these names."""
        self._config, self._structure, self._files = config, structure, files
        self.origin, self.module_names = origin, (MODULE,)

    def skeleton(self, name: str, dtype: torch.dtype) -> nn.Module:
        with init_empty_weights():
            model = new_model(self._config)
        cast_skeleton(model, dtype)
        return model.eval()

    def weight_files(self, name: str) -> list[Path]:
        return self._files(set(self.skeleton(name, torch.float32).state_dict()))

    def block_names(self, name: str) -> tuple[str, ...]:
        return self._structure.block_names

    def calls(self, request: Request) -> list[Call]:
        return [Call(MODULE, request.inputs, request.wanted)]

    def run(self, module: nn.Module, call: Call) -> Outputs:
        dtype = next(module.parameters()).dtype
        names = {name: self._structure.block_names[int(name.removeprefix(FEATURES))]
                 for name in call.wanted if name.startswith(FEATURES)}  # fmt: skip
        with capture_outputs([(name, module.get_submodule(path)) for name, path in names.items()]) as captured:
            logits = module(pixel_values=call.inputs["pixels"].to(dtype)).logits
        return {LOGITS: logits, **{name: first_tensor(value) for name, value in captured.items()}}

    def merge(self, request: Request, outputs: Sequence[Outputs]) -> Outputs:
        return dict(outputs[0])
