"""A Wan teacher as a `Network`: one transformer, or Wan 2.2's two experts chosen by timestep, sample by sample."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from distiller.capture import capture_outputs
from distiller.teachers.base import Network, Outputs, Request
from distiller.wan.pipeline import WanFiles
from distiller.wan.short_text import install_short_text

PREDICTION = "prediction"
UNCONDITIONAL = "unconditional"
FEATURES = "features/"


class WanNetwork(Network):
    """The transformers of a WanPipeline.

    Request inputs: `latents` [B, C, F, H, W] float32, `timesteps` [B] float32 in (0, 1000), `text` [B, L, D] (real
    tokens, then at least one zero row), and `negative_text` [B, L', D] where `unconditional` is wanted.
    Outputs: `prediction` and `unconditional` like the latents, `features/N` [B, tokens, dim] of block N (conditional
    pass), in the module's dtype.
    """

    def __init__(self, files: WanFiles, max_sequence_length: int) -> None:
        self._files, self._max_sequence_length = files, max_sequence_length
        self.module_names = tuple(files.transformer_configs)

    @property
    def boundary_timestep(self) -> float | None:
        """From here up the first module predicts, below it the second; None with one module."""
        return self._files.boundary_timestep

    def route(self, timesteps: Sequence[float]) -> tuple[int, ...]:
        """The module of each sample, as the pipeline chooses it; empty with one module."""
        boundary = self.boundary_timestep
        return () if boundary is None else tuple(0 if t >= boundary else 1 for t in timesteps)

    def load(self, name: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
        root = self._files.fetch(name)
        transformer = WanTransformer3DModel.from_pretrained(
            os.fspath(root),
            subfolder=name,
            dtype=dtype,
            low_cpu_mem_usage=True,
            use_safetensors=True,
            local_files_only=True,
        )
        install_short_text(transformer, self._max_sequence_length)
        return transformer.eval().requires_grad_(False).to(device)

    def num_parameters(self) -> int:
        with init_empty_weights():
            modules = [WanTransformer3DModel.from_config(c) for c in self._files.transformer_configs.values()]
        return sum(parameter.numel() for module in modules for parameter in module.parameters())

    def forward(self, modules: Mapping[str, nn.Module], request: Request) -> Outputs:
        if not request.modules:
            return _run(modules[self.module_names[0]], request.inputs, request.wanted)
        merged: Outputs = {}
        for place, name in enumerate(self.module_names):
            rows = [row for row, module in enumerate(request.modules) if module == place]
            if not rows:
                continue
            index = torch.tensor(rows, device=request.inputs["latents"].device)
            part = {key: value.index_select(0, index) for key, value in request.inputs.items()}
            for key, value in _run(modules[name], part, request.wanted).items():
                if key not in merged:
                    merged[key] = value.new_empty(len(request.modules), *value.shape[1:])
                merged[key].index_copy_(0, index, value)
        return merged


def _run(transformer: nn.Module, inputs: Mapping[str, Tensor], wanted: Sequence[str]) -> Outputs:
    dtype = next(iter(transformer.patch_embedding.parameters())).dtype
    latents, timesteps = inputs["latents"].to(dtype), inputs["timesteps"]
    blocks = [
        (name, transformer.blocks[int(name.removeprefix(FEATURES))]) for name in wanted if name.startswith(FEATURES)
    ]
    outputs: Outputs = {}
    if PREDICTION in wanted or blocks:
        with capture_outputs(blocks) as captured:
            outputs[PREDICTION] = transformer(latents, timesteps, inputs["text"].to(dtype), return_dict=False)[0]
        outputs |= captured
    if UNCONDITIONAL in wanted:
        text = inputs["negative_text"].to(dtype)
        outputs[UNCONDITIONAL] = transformer(latents, timesteps, text, return_dict=False)[0]
    return outputs
