"""A Wan teacher as a `Network`: one transformer, or Wan 2.2's two experts chosen by timestep, sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from distiller.capture import capture_outputs
from distiller.teachers.base import Call, Network, Outputs, Request
from distiller.wan.pipeline import WanFiles, model_files
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
        self.origin = f"teacher.path: {files.source}"
        self.module_names = tuple(files.transformer_configs)

    @property
    def boundary_timestep(self) -> float | None:
        """From here up the first module predicts, below it the second; None with one module."""
        return self._files.boundary_timestep

    def route(self, timesteps: Sequence[float]) -> tuple[int, ...]:
        """The module of each sample, as the pipeline chooses it; empty with one module."""
        boundary = self.boundary_timestep
        return () if boundary is None else tuple(0 if t >= boundary else 1 for t in timesteps)

    def skeleton(self, name: str, dtype: torch.dtype) -> nn.Module:
        with init_empty_weights():
            transformer = WanTransformer3DModel.from_config(self._files.transformer_configs[name])
        # As from_pretrained does: these stay in float32 whatever dtype is asked for.
        islands = set(WanTransformer3DModel._keep_in_fp32_modules or ())
        for path, module in transformer.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    kept = torch.float32 if islands.intersection([*path.split("."), attribute]) else dtype
                    module._parameters[attribute] = nn.Parameter(parameter.detach().to(kept), requires_grad=False)
        install_short_text(transformer, self._max_sequence_length)
        return transformer.eval()

    def weight_files(self, name: str) -> list[Path]:
        return model_files(self._files.fetch(name) / name)

    def block_names(self, name: str) -> tuple[str, ...]:
        return tuple(f"blocks.{number}" for number in range(self._files.transformer_configs[name]["num_layers"]))

    def calls(self, request: Request) -> list[Call]:
        conditional = tuple(name for name in request.wanted if name != UNCONDITIONAL)
        passes = [wanted for wanted in (conditional, (UNCONDITIONAL,)) if set(wanted) & set(request.wanted)]
        calls = []
        for name, rows in self._rows(request):
            inputs = request.inputs
            if len(rows) < len(request.sample_ids):
                index = _index(rows, inputs["latents"].device)
                inputs = {key: value.index_select(0, index) for key, value in inputs.items()}
            for wanted in passes:
                text = inputs["negative_text" if wanted == (UNCONDITIONAL,) else "text"]
                one = {"latents": inputs["latents"], "timesteps": inputs["timesteps"], "text": text}
                calls.append(Call(name, one, wanted))
        return calls

    def run(self, module: nn.Module, call: Call) -> Outputs:
        dtype = next(iter(module.patch_embedding.parameters())).dtype
        latents, timesteps, text = (call.inputs[name] for name in ("latents", "timesteps", "text"))
        blocks = [
            (name, module.blocks[int(name.removeprefix(FEATURES))]) for name in call.wanted if name.startswith(FEATURES)
        ]
        with capture_outputs(blocks) as captured:
            prediction = module(latents.to(dtype), timesteps, text.to(dtype), return_dict=False)[0]
        return {UNCONDITIONAL if call.wanted == (UNCONDITIONAL,) else PREDICTION: prediction, **captured}

    def merge(self, request: Request, outputs: Sequence[Outputs]) -> Outputs:
        parts = iter(outputs)
        merged: Outputs = {}
        for name, rows in self._rows(request):
            del name
            count = 2 if UNCONDITIONAL in request.wanted and len(request.wanted) > 1 else 1
            of_module = {key: value for _ in range(count) for key, value in next(parts).items()}
            if len(rows) == len(request.sample_ids):
                merged |= of_module
                continue
            index = _index(rows, next(iter(of_module.values())).device)
            for key, value in of_module.items():
                if key not in merged:
                    merged[key] = value.new_empty(len(request.sample_ids), *value.shape[1:])
                merged[key].index_copy_(0, index, value)
        return merged

    def _rows(self, request: Request) -> list[tuple[str, list[int]]]:
        """The modules that a request needs, each with its samples' places in the batch."""
        if not request.modules:
            return [(self.module_names[0], list(range(len(request.sample_ids))))]
        rows = {name: [i for i, m in enumerate(request.modules) if m == n] for n, name in enumerate(self.module_names)}
        return [(name, places) for name, places in rows.items() if places]


def _index(rows: Sequence[int], device: torch.device) -> Tensor:
    """Rows as int64 on the device. From memory that is not page-locked the copy would wait for all queued work."""
    index = torch.tensor(rows)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index
