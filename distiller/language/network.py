"""A causal language model as a `Network`: its body, without the output layer, which every rank holds itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from torch import nn

from distiller.errors import UserError
from distiller.language.model.files import LanguageFiles
from distiller.language.model.logits import Head, TokenIds, product_width
from distiller.storage.weight_files import WeightFiles
from distiller.tasks.feature_capture import capture_outputs
from distiller.teachers.base import Call, Network, Outputs, Request

BODY = "body"
HIDDEN = "hidden"
FEATURES = "features/"


@final
class LanguageNetwork(Network):
    """Logits are as wide as the vocabulary and never travel: what does is what the output layer is applied to.

    Request inputs: `input_ids` and `position_ids` [B, L] int64; see `distiller.language.data.batch.LanguageBatch`.
    Outputs: `hidden`, the last hidden states [B, L, H], and `features/N`, what block N returns, [B, L, H]; in the
    module's dtype.
    """

    def __init__(self, files: LanguageFiles, student_vocabulary: int | None = None) -> None:
        """`student_vocabulary`: ids of the student's output layer; only ids that both models have are compared."""
        self._files, self.origin, self.module_names = files, files.origin, (BODY,)
        self.rename = files.anatomy.body_name
        anatomy = files.anatomy
        # Beyond the ids of tokens, what an output layer holds is padding, of which nothing need be true.
        # A tokenizer may have ids that a model has no place for: of pictures, or a padding token added afterwards.
        shared = min(anatomy.vocabulary, student_vocabulary or anatomy.vocabulary)
        self.ids = TokenIds(shared) if files.tokenizer is None else TokenIds.of(files.tokenizer, below=shared)
        self.num_replicated_head_parameters = 0 if anatomy.is_tied else anatomy.vocabulary * anatomy.hidden_size

    def skeleton(self, name: str, dtype: torch.dtype) -> nn.Module:
        return self._files.anatomy.body_skeleton(dtype)

    def weight_files(self, name: str) -> list[Path]:
        return self._files.weight_files()

    def block_names(self, name: str) -> tuple[str, ...]:
        anatomy = self._files.anatomy
        return tuple(f"{anatomy.block_prefix}{number}" for number in range(anatomy.num_blocks))

    def calls(self, request: Request) -> list[Call]:
        return [Call(BODY, request.inputs, request.wanted)]

    def run(self, module: nn.Module, call: Call) -> Outputs:
        prefix = self._files.anatomy.block_prefix
        blocks = [
            (name, module.get_submodule(f"{prefix}{name.removeprefix(FEATURES)}"))
            for name in call.wanted
            if name.startswith(FEATURES)
        ]
        with capture_outputs(blocks) as captured:
            hidden = module(**call.inputs, use_cache=False).last_hidden_state
        return {HIDDEN: hidden, **captured}

    def merge(self, request: Request, outputs: Sequence[Outputs]) -> Outputs:
        return outputs[0]

    def head_bytes(self, dtype: torch.dtype) -> int:
        """What `load_head` takes."""
        anatomy = self._files.anatomy
        columns = anatomy.hidden_size + (anatomy.head_bias is not None)
        return product_width(self.ids.size, anatomy.vocabulary) * columns * dtype.itemsize

    def load_head(self, dtype: torch.dtype, device: torch.device) -> Head:
        """Reads the output layer, and keeps the ids of tokens (see `product_width`): frozen, in `teacher.dtype`.

        Communicates nothing: every rank reads it. Raises UserError where it is missing.
        """
        anatomy = self._files.anatomy
        files = WeightFiles(self._files.weight_files(), anatomy.renaming.name)
        try:
            name = next((name for name in anatomy.head_names if name in files.tensors), None)
            if name is None:
                raise UserError(f"{self.origin}: its weights lack {anatomy.head_names[0]}; copy it again")
            weight = torch.empty(anatomy.vocabulary, anatomy.hidden_size, dtype=dtype)
            if files.tensors[name].shape != tuple(weight.shape):
                raise UserError(
                    f"{self.origin}: {name} has shape {list(files.tensors[name].shape)} in the weights and "
                    f"{list(weight.shape)} by its config.json; the two do not belong together"
                )
            files.read(name, weight)
            bias = None
            if anatomy.head_bias is not None:
                bias = torch.empty(anatomy.vocabulary, dtype=dtype)
                files.read(anatomy.head_bias, bias)
        finally:
            files.close()
        width = product_width(self.ids.size, anatomy.vocabulary)
        bias = None if bias is None else bias[:width].to(device)
        return Head(weight[:width].to(device), bias, anatomy.logit_change, self.ids)
