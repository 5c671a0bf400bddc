"""Replaces the student's BatchNorm layers as `student.batch_norm` says.

With the statistics of a micro-batch, a layer's output depends on how an update is split into micro-batches: one of 8
samples and two of 4 differ by 1e-2 in the loss. With frozen statistics or GroupNorm (Wu and He 2018), the output for a
sample does not depend on other samples.
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_GROUPS, MIN_CHANNELS_A_GROUP = 32, 4


@final
class BatchNorm(nn.Module):
    """A BatchNorm layer with the same tensor names, which casts weight and bias to the dtype of its statistics.

    An engine that holds weights in bfloat16 (ZeRO, FSDP2) leaves statistics in float32. CUDA kernels refuse the two
    together in the backward pass ("Expected running_mean to have type BFloat16 but got Float", torch 2.11). So weight
    and bias are cast here, on every device; the input keeps its dtype.

    Attributes:
        is_frozen: normalises by the running statistics in training too; weight and bias are trained.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, layer: nn.BatchNorm1d | nn.BatchNorm2d, is_frozen: bool) -> None:
        super().__init__()
        self.eps, self.momentum, self.is_frozen = layer.eps, layer.momentum, is_frozen
        self.weight, self.bias = layer.weight, layer.bias
        self.register_buffer("running_mean", layer.running_mean)
        self.register_buffer("running_var", layer.running_var)
        self.register_buffer("num_batches_tracked", layer.num_batches_tracked)

    def forward(self, input: Tensor) -> Tensor:
        """Normalises [B, C, ...]; returns the same shape and dtype.

        In training, unless frozen, uses the statistics of the batch, and updates the running ones and the batch count.
        """
        mean, variance = self.running_mean, self.running_var
        weight, bias = (None if tensor is None else tensor.to(dtype=mean.dtype) for tensor in (self.weight, self.bias))
        if self.is_frozen or not self.training:
            return F.batch_norm(input, mean, variance, weight, bias, False, 0.0, self.eps)
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        return F.batch_norm(input, mean, variance, weight, bias, True, share, self.eps)


def num_groups(num_channels: int) -> int:
    """The largest number of groups, at most 32, of equal size and with at least 4 channels each; 1 where none fits."""
    most = min(MAX_GROUPS, num_channels // MIN_CHANNELS_A_GROUP)
    return next((count for count in range(most, 1, -1) if num_channels % count == 0), 1)


def replace_batch_norm(model: nn.Module, kind: str) -> None:
    """Replaces the model's BatchNorm layers in place by what `kind` (batch, frozen or group) means.

    Weight and bias are kept. GroupNorm has no running statistics, so a trained model has to be trained further. With
    batch and frozen, a layer without running statistics is not replaced: it always normalises by its batch.
    """
    for layer in list(model.modules()):
        for name, child in list(layer.named_children()):
            if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
                if kind == "group":
                    setattr(layer, name, _group_norm(child))
                elif child.track_running_stats:
                    setattr(layer, name, BatchNorm(child, is_frozen=kind == "frozen"))


def has_batch_norm(model: nn.Module) -> bool:
    """Whether any layer of the model is a BatchNorm layer, replaced by `BatchNorm` or not."""
    return any(isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | BatchNorm) for layer in model.modules())


def _group_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d) -> nn.GroupNorm:
    group = nn.GroupNorm(num_groups(layer.num_features), layer.num_features, layer.eps, device=torch.device("meta"))
    group.weight, group.bias = layer.weight, layer.bias
    return group
