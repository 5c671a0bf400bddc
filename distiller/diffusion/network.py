"""A pipeline's teacher as a `Network`: one module, or Wan 2.2's two experts chosen by timestep, sample by sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from distiller.diffusion.family import Family
from distiller.diffusion.pipeline import model_files
from distiller.tasks.feature_capture import capture_outputs
from distiller.tasks.skeleton import cast_skeleton
from distiller.teachers.base import Call, HasErrorBands, Network, Outputs, Request

PREDICTION = "prediction"
UNCONDITIONAL = "unconditional"
FEATURES = "features/"
"""Names of outputs; `FEATURES` is a prefix, which a block's index follows."""
NEGATIVE = "negative_"
"""Prefix of inputs that belong to the negative prompt."""


class DiffusionNetwork(Network, HasErrorBands):
    """The networks of a pipeline that predict.

    Inputs of a request: `latents` [B, C, F, H, W] float32, `timesteps` [B] float32, the prompts' conditions [B, ...] by
    name (`text` [B, L, D] and others), and, where `unconditional` is wanted, those of the negative prompt as
    `negative_NAME`.
    Outputs in the module's dtype: `prediction` and `unconditional` [B, C, F, H, W], and `features/N`
    [B, tokens, width], the output of block N in the conditional pass.
    """

    def __init__(self, family: Family, max_sequence_length: int) -> None:
        self._files, self.architecture = family.files, family.architecture
        self.sizes_vary = family.architecture.sizes_vary
        self._max_sequence_length = max_sequence_length
        self.origin = f"teacher.path: {self._files.source}"
        self.module_names = tuple(self._files.configs)

    @property
    def boundary_timestep(self) -> float | None:
        """At this timestep and above the first module predicts, below it the second; None with one module."""
        return self._files.boundary_timestep

    def route(self, timesteps: Sequence[float]) -> tuple[int, ...]:
        """The index of each sample's module, by the pipeline's rule; empty with one module."""
        boundary = self.boundary_timestep
        return () if boundary is None else tuple(0 if t >= boundary else 1 for t in timesteps)

    def error_band(self, request: Request) -> str:
        whole = self._files.num_train_timesteps
        third = min(int(3 * float(request.inputs["timesteps"][0]) / whole), 2)
        return f"timesteps {third * whole // 3} to {(third + 1) * whole // 3}"

    def skeleton(self, name: str, dtype: torch.dtype) -> nn.Module:
        model_class = self.architecture.model_class
        with init_empty_weights():
            model = model_class.from_config(self._files.configs[name])
        cast_skeleton(model, dtype)
        self.architecture.prepare(model, self._max_sequence_length)
        return model.eval()

    def weight_files(self, name: str) -> list[Path]:
        return model_files(self._files.fetch(name) / name)

    def block_names(self, name: str) -> tuple[str, ...]:
        return self.architecture.block_names(self._files.configs[name])

    def calls(self, request: Request) -> list[Call]:
        conditional = tuple(name for name in request.wanted if name != UNCONDITIONAL)
        passes = [wanted for wanted in (conditional, (UNCONDITIONAL,)) if set(wanted) & set(request.wanted)]
        calls = []
        for name, rows in self._rows(request):
            inputs = request.inputs
            if len(rows) < len(request.sample_ids):
                index = _index(rows, inputs["latents"].device)
                inputs = {key: value.index_select(0, index) for key, value in inputs.items()}
            calls += [Call(name, _inputs_of(inputs, wanted == (UNCONDITIONAL,)), wanted) for wanted in passes]
        return calls

    def run(self, module: nn.Module, call: Call) -> Outputs:
        architecture, inputs = self.architecture, dict(call.inputs)
        dtype = next(iter(architecture.input_layer(module).parameters())).dtype
        latents, timesteps = inputs.pop("latents").to(dtype), inputs.pop("timesteps")
        names, blocks = self.block_names(call.module), []
        for name in call.wanted:
            if name.startswith(FEATURES):
                blocks.append((name, module.get_submodule(names[int(name.removeprefix(FEATURES))])))
        conditions = {name: value.to(dtype) for name, value in inputs.items()}
        with capture_outputs(blocks) as captured:
            prediction = architecture.forward(module, latents, timesteps, conditions)
        features = {name: architecture.feature(output) for name, output in captured.items()}
        return {UNCONDITIONAL if call.wanted == (UNCONDITIONAL,) else PREDICTION: prediction, **features}

    def merge(self, request: Request, outputs: Sequence[Outputs]) -> Outputs:
        parts = iter(outputs)
        merged: Outputs = {}
        for name, rows in self._rows(request):
            del name
            num_passes = 2 if UNCONDITIONAL in request.wanted and len(request.wanted) > 1 else 1
            of_module = {key: value for _ in range(num_passes) for key, value in next(parts).items()}
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
        """(name, rows of its samples in the batch) of each module that a request needs."""
        if not request.modules:
            return [(self.module_names[0], list(range(len(request.sample_ids))))]
        rows_of = {
            name: [i for i, module in enumerate(request.modules) if module == index]
            for index, name in enumerate(self.module_names)
        }
        return [(name, rows) for name, rows in rows_of.items() if rows]


def inputs_of(
    latents: Tensor, timesteps: Tensor, positive: Mapping[str, Tensor], negative: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """The inputs of a request by name. `negative` is given where the unconditional prediction is wanted."""
    named = {f"{NEGATIVE}{name}": value for name, value in (negative or {}).items()}
    return {"latents": latents, "timesteps": timesteps, **positive, **named}


def _inputs_of(inputs: Mapping[str, Tensor], is_unconditional: bool) -> dict[str, Tensor]:
    """The inputs of one pass: with the prompts' conditions, or with those of the negative prompt instead."""
    plain = {name: value for name, value in inputs.items() if not name.startswith(NEGATIVE)}
    if not is_unconditional:
        return plain
    return plain | {name.removeprefix(NEGATIVE): value for name, value in inputs.items() if name.startswith(NEGATIVE)}


def _index(rows: Sequence[int], device: torch.device) -> Tensor:
    """Rows as int64 [n] on the device. From memory that is not page-locked, the copy would wait for all queued work."""
    index = torch.tensor(rows)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index
