"""The trained module: a language model whose output layer computes the loss, and projections for feature matching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from distiller.language.loss.chunked_loss import chunked_loss
from distiller.language.loss.targets import Target
from distiller.language.loss.token_losses import Objective
from distiller.language.model.logits import Head, LogitChange, TokenIds
from distiller.tasks.feature_capture import block_hidden, capture_outputs
from distiller.tasks.feature_matching import new_projections
from distiller.tasks.losses import mean_squared_error
from distiller.tasks.student_module import TrainedStudent


@final
@dataclass(frozen=True, eq=False)
class LossInputs:
    """One micro-batch's input, and the teacher's outputs that the student is compared with.

    The tensors are fields of one object, since engines cast tensors that are arguments of `forward` and move them to
    the GPU. With the loss mask on the GPU, the host would have to wait to learn which tokens count.

    Attributes:
        input_ids, position_ids: [B, L] int64, on the student's device.
        labels: [B L] int64, on the student's device.
        loss_mask: [B L] bool, true at learnt tokens; on any device, but only on the CPU without a wait of the host.
        target: the teacher's outputs for the B L tokens, on the student's device.
        features: outputs of the teacher's matched blocks, each [B L, H'], on the student's device.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    target: Target
    features: tuple[Tensor, ...]


class LossTerms(NamedTuple):
    """Sums over a micro-batch's learnt tokens, float32 scalars; only `loss` and `features` have gradients.

    `loss` is the sum that `Objective` defines; `divergence` carries its factor temperature^2. `features` is the mean
    over matched blocks of the mean squared error.
    """

    loss: Tensor
    divergence: Tensor
    cross_entropy: Tensor
    unused_ids: Tensor
    features: Tensor


@final
class FusedLossHead(nn.Linear):
    """The student's output layer, which computes the loss of hidden states chunk by chunk and keeps no logits.

    The output weight is this module's own parameter, tied or not, so that engines that shard weights gather the weight
    for the module's forward and backward passes.
    """

    def __init__(self, like: nn.Linear, objective: Objective, change: LogitChange, ids: TokenIds) -> None:
        """Uses the parameters of `like`, not copies of them, so that a tied weight stays tied.

        Args:
            like: the model's own output layer.
            objective: the loss per token.
            change: what the model does to the layer's logits.
            ids: the ids that stand for a token.
        """
        super().__init__(like.in_features, like.out_features, bias=like.bias is not None, device="meta")
        self.weight, self.bias = like.weight, like.bias
        self._objective, self._change, self._ids = objective, change, ids

    @property
    def head(self) -> Head:
        """The layer's weight and bias, with the change of logits and the ids that are compared."""
        return Head(self.weight, self.bias, self._change, self._ids)

    @torch.compiler.disable
    def forward(self, hidden: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Loss, divergence, cross-entropy and unused-ids term of hidden states [B, L, H]; see `LossTerms`."""
        sums = chunked_loss(
            hidden.flatten(0, 1),
            self.weight,
            inputs.target,
            inputs.labels,
            inputs.loss_mask,
            self._objective,
            bias=self.bias,
            change=self._change,
            ids=self._ids,
        )
        return sums.loss, sums.divergence, sums.cross_entropy, sums.unused


@final
class LanguageStudent(TrainedStudent):
    """The student model and, for feature matching, projections from its hidden size to the teacher's."""

    def __init__(
        self,
        model: Any,
        objective: Objective,
        block_prefix: str,
        feature_blocks: Sequence[int],
        widths: tuple[int, int],
        seed: int,
        change: LogitChange,
        ids: TokenIds,
    ) -> None:
        """Replaces the model's output layer by a `FusedLossHead`.

        Args:
            model: a causal language model of transformers, changed in place.
            objective: the loss per token, without features.
            block_prefix: what the blocks' names begin with in the model's body, such as `layers.`.
            feature_blocks: indices of the student's matched blocks; empty without feature matching.
            widths: the hidden sizes of student and teacher.
            seed: the run's; projections are drawn from it.
            change: what the model does to the logits of its output layer.
            ids: the ids that stand for a token.
        """
        super().__init__(model)
        model.set_output_embeddings(FusedLossHead(model.get_output_embeddings(), objective, change, ids))
        self._blocks = [f"{block_prefix}{index}" for index in feature_blocks]
        self.projections = new_projections([((widths[0],), (widths[1],)) for _ in feature_blocks], seed)

    def forward(self, inputs: LossInputs) -> LossTerms:
        """Runs the model and compares its outputs with the teacher's."""
        body = self.model.base_model
        with capture_outputs([(name, body.get_submodule(name)) for name in self._blocks]) as captured:
            hidden = body(
                input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False
            ).last_hidden_state
        loss, divergence, cross_entropy, unused_ids = self.model.get_output_embeddings()(hidden, inputs)
        features = hidden.new_zeros((), dtype=torch.float32)
        if not self._blocks:
            return LossTerms(loss, divergence, cross_entropy, unused_ids, features)
        is_ignored = ~inputs.loss_mask.to(hidden.device, non_blocking=True)
        # Indexed, since Accelerate's regional compilation replaces an empty ModuleList by a module without iteration.
        for index, name in enumerate(self._blocks):
            projected = self.projections[index](block_hidden(captured[name]).flatten(0, 1))
            errors = mean_squared_error(projected, inputs.features[index])
            features = features + errors.masked_fill(is_ignored, 0).sum()
        return LossTerms(loss, divergence, cross_entropy, unused_ids, features / len(self._blocks))
