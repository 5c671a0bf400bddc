"""What is trained: a language model whose output layer compares with the teacher, and projections for features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from distiller.language.loss.chunked_loss import Target, chunked_loss
from distiller.language.loss.token_losses import Objective
from distiller.language.model.logits import Head, LogitChange, TokenIds
from distiller.tasks.feature_capture import capture_outputs
from distiller.tasks.losses import mean_squared_error
from distiller.tasks.student_module import TrainedStudent


@final
@dataclass(frozen=True, eq=False)
class LossInputs:
    """One micro-batch's input, and what the student is compared with.

    An object of its own, and no tensors among the arguments: engines cast those and move them to the GPU, where finding
    out which tokens count would make the host wait.

    Attributes:
        input_ids, position_ids: [B, L] int64, on the student's device.
        labels: [B L] int64, on the student's device.
        counts: [B L] bool, on the CPU where the batch came from there.
        target: the teacher, B L rows, on the student's device.
        features: of the teacher's blocks, each [B L, H'].
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    counts: Tensor
    target: Target
    features: tuple[Tensor, ...]


class LessonSums(NamedTuple):
    """Sums over a micro-batch's learnt tokens; float32 scalars. `loss` and `features` have gradients."""

    loss: Tensor
    divergence: Tensor
    cross_entropy: Tensor
    unused_ids: Tensor
    features: Tensor


@final
class ComparingOutput(nn.Linear):
    """The student's output layer, which makes logits chunk by chunk and keeps none.

    A module with its weight in it, tied or not, so that engines which shard weights gather this one around its forward
    pass and around its backward pass.
    """

    def __init__(self, like: nn.Linear, objective: Objective, change: LogitChange, ids: TokenIds) -> None:
        """Takes the parameters of `like` themselves, so that a tied weight stays tied.

        `change` is what the model does to the layer's logits, `ids` are those that stand for a token.
        """
        super().__init__(like.in_features, like.out_features, bias=like.bias is not None, device="meta")
        self.weight, self.bias = like.weight, like.bias
        self._objective, self._change, self._ids = objective, change, ids

    @property
    def head(self) -> Head:
        """The layer, as what is compared is made with it."""
        return Head(self.weight, self.bias, self._change, self._ids)

    @torch.compiler.disable
    def forward(self, hidden: Tensor, lesson: LossInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Loss, divergence, cross-entropy and unused ids of hidden states [B, L, H]: sums over tokens that count."""
        sums = chunked_loss(
            hidden.flatten(0, 1),
            self.weight,
            lesson.target,
            lesson.labels,
            lesson.counts,
            self._objective,
            bias=self.bias,
            change=self._change,
            ids=self._ids,
        )
        return sums.loss, sums.divergence, sums.cross_entropy, sums.unused


@final
class LanguageStudent(TrainedStudent):
    """The student model and, for feature matching, projections into the teacher's width."""

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
        """`model` is the library's; `widths` are the student's and the teacher's hidden sizes.

        `change` is what the model does to its output layer's logits, `ids` are those that stand for a token.
        """
        super().__init__(model)
        model.set_output_embeddings(ComparingOutput(model.get_output_embeddings(), objective, change, ids))
        self._blocks = [f"{block_prefix}{number}" for number in feature_blocks]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 1)
            self.projections = nn.ModuleList(nn.Linear(*widths, bias=False) for _ in feature_blocks)

    def forward(self, lesson: LossInputs) -> LessonSums:
        """Runs the model and compares it with the teacher."""
        body = self.model.base_model
        with capture_outputs([(name, body.get_submodule(name)) for name in self._blocks]) as captured:
            hidden = body(
                input_ids=lesson.input_ids, position_ids=lesson.position_ids, use_cache=False
            ).last_hidden_state
        loss, divergence, cross_entropy, unused_ids = self.model.get_output_embeddings()(hidden, lesson)
        features = hidden.new_zeros((), dtype=torch.float32)
        if not self._blocks:
            return LessonSums(loss, divergence, cross_entropy, unused_ids, features)
        left_out = ~lesson.counts.to(hidden.device, non_blocking=True)
        # By index: Accelerate's regional compilation wraps an empty list into a module that cannot be iterated.
        for number, name in enumerate(self._blocks):
            ours = self.projections[number](captured[name].flatten(0, 1))
            distances = mean_squared_error(ours, lesson.features[number])
            features = features + distances.masked_fill(left_out, 0).sum()
        return LessonSums(loss, divergence, cross_entropy, unused_ids, features / len(self._blocks))
