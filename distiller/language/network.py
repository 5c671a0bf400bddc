"""A causal language model as a teacher's `Network`: all but the output layer, of which every rank holds a copy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from torch import nn

from distiller.errors import UserError
from distiller.language.loss.chunked_loss import chunked_loss
from distiller.language.loss.targets import HiddenTarget
from distiller.language.loss.token_losses import Objective
from distiller.language.model.files import LanguageFiles
from distiller.language.model.logits import Head, TokenIds, product_width
from distiller.storage.weight_files import WeightFiles
from distiller.tasks.feature_capture import block_hidden, capture_outputs
from distiller.teachers.base import Call, Figures, HasTokenErrors, Network, Outputs, Request

BODY = "body"
"""Name of the network's only module: the model without its output layer."""
HIDDEN = "hidden"
"""Name of the output with the last hidden states."""
FEATURES = "features/"
"""What names of block outputs begin with; the block's index follows."""


@final
class LanguageNetwork(Network, HasTokenErrors):
    """Returns last hidden states, not logits: a token's logits, one per id, take far more memory to move or to store.

    Request inputs: `input_ids` and `position_ids` [B, L] int64; see `distiller.language.data.batch.LanguageBatch`.
    Outputs, in the module's dtype: `hidden`, the last hidden states [B, L, H], and `features/N`, the output of block N
    [B, L, H].
    """

    sizes_vary = True

    def __init__(self, files: LanguageFiles, student_vocabulary: int | None = None) -> None:
        """Reads no weights.

        Args:
            files: the saved model.
            student_vocabulary: number of ids of the student's output layer: only ids that both models have are
                compared. None = all of this model's.
        """
        self._files, self.origin, self.module_names = files, files.origin, (BODY,)
        self.rename = files.spec.body_name
        spec = files.spec
        # Rows of an output layer beyond the tokenizer's ids are padding with arbitrary logits: they are not compared. A
        # tokenizer may also have ids without a row in the model: image tokens, or a padding token added later.
        shared = min(spec.vocabulary, student_vocabulary or spec.vocabulary)
        self.ids = TokenIds(shared) if files.tokenizer is None else TokenIds.of(files.tokenizer, below=shared)
        num_weights = 0 if spec.is_tied else spec.vocabulary * spec.hidden_size
        num_biases = 0 if spec.head_bias is None else spec.vocabulary
        self.num_replicated_head_parameters = num_weights + num_biases

    def skeleton(self, name: str, dtype: torch.dtype) -> nn.Module:
        return self._files.spec.body_skeleton(dtype)

    def weight_files(self, name: str) -> list[Path]:
        return self._files.weight_files()

    def block_names(self, name: str) -> tuple[str, ...]:
        spec = self._files.spec
        return tuple(f"{spec.block_prefix}{index}" for index in range(spec.num_blocks))

    def calls(self, request: Request) -> list[Call]:
        return [Call(BODY, request.inputs, request.wanted)]

    def run(self, module: nn.Module, call: Call) -> Outputs:
        prefix = self._files.spec.block_prefix
        blocks = [
            (name, module.get_submodule(f"{prefix}{name.removeprefix(FEATURES)}"))
            for name in call.wanted
            if name.startswith(FEATURES)
        ]
        with capture_outputs(blocks) as captured:
            hidden = module(**call.inputs, use_cache=False).last_hidden_state
        return {HIDDEN: hidden, **{name: block_hidden(output) for name, output in captured.items()}}

    def merge(self, request: Request, outputs: Sequence[Outputs]) -> Outputs:
        return outputs[0]

    def token_errors(self, quantised: Sequence[Outputs], reference: Sequence[Outputs], dtype: torch.dtype) -> Figures:
        """KL(reference || quantised), the mean in nats, and the share of positions with the same most likely token."""
        ours, theirs = (
            torch.cat([output[HIDDEN].flatten(0, 1) for output in outputs]) for outputs in (quantised, reference)
        )
        head, mask = self.load_head(dtype, ours.device), torch.ones(len(ours), dtype=torch.bool, device=ours.device)
        options = {"bias": head.bias, "change": head.change, "ids": head.ids}
        with torch.no_grad():
            target = HiddenTarget.of(theirs, head)
            sums = chunked_loss(ours, head.weight, target, mask.long(), mask, Objective(), **options)
        return {
            "KL in nats": float(sums.divergence) / len(ours),
            "same top token": float(sums.agreeing) / len(ours),
        }

    def head_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the output layer that `load_head` returns for this dtype. Reads no weights."""
        spec = self._files.spec
        columns = spec.hidden_size + (spec.head_bias is not None)
        return product_width(self.ids.size, spec.vocabulary) * columns * dtype.itemsize

    def head_without_data(self, dtype: torch.dtype) -> Head:
        """A layer of the shapes of `load_head`'s, uninitialised, on the default device."""
        spec = self._files.spec
        width = product_width(self.ids.size, spec.vocabulary)
        bias = None if spec.head_bias is None else torch.empty(width, dtype=dtype)
        return Head(torch.empty(width, spec.hidden_size, dtype=dtype), bias, spec.logit_change, self.ids)

    def load_head(self, dtype: torch.dtype, device: torch.device) -> Head:
        """Reads the output layer onto `device`, frozen, in `dtype`.

        Keeps only the rows of ids that stand for a token, and a few more (see `product_width`). Does not communicate:
        every rank reads the files. Raises UserError where the files lack the layer or hold another shape of it.
        """
        spec = self._files.spec
        files = WeightFiles(self._files.weight_files(), spec.tensor_names.name)
        try:
            name = next((name for name in spec.head_names if name in files.tensors), None)
            if name is None:
                raise UserError(f"{self.origin}: its weights lack {spec.head_names[0]}; copy it again")
            weight = torch.empty(spec.vocabulary, spec.hidden_size, dtype=dtype)
            if files.tensors[name].shape != tuple(weight.shape):
                raise UserError(
                    f"{self.origin}: {name} has shape {list(files.tensors[name].shape)} in the weights and "
                    f"{list(weight.shape)} by its config.json; the two do not belong together"
                )
            files.read(name, weight)
            bias = None
            if spec.head_bias is not None:
                bias = torch.empty(spec.vocabulary, dtype=dtype)
                files.read(spec.head_bias, bias)
        finally:
            files.close()
        width = product_width(self.ids.size, spec.vocabulary)
        bias = None if bias is None else bias[:width].to(device)
        return Head(weight[:width].to(device), bias, spec.logit_change, self.ids)
