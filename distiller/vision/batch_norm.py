"""What becomes of the student's BatchNorm layers (`student.batch_norm`).

With the statistics of its own micro-batch, a layer's answers depend on how an update is split: 8 samples at once and
2 x 4 differ by 1e-2 in the loss. Frozen statistics, and GroupNorm (Wu and He 2018), look at one sample at a time.
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_GROUPS, MIN_CHANNELS_A_GROUP = 32, 4


@final
class BatchNorm(nn.Module):
    """A BatchNorm layer's tensors under their names, and its arithmetic in the dtype of its statistics.

    An engine that holds weights in bfloat16 (ZeRO, FSDP2) leaves statistics in float32, and the kernels of GPUs refuse
    the two together in the backward pass ("Expected running_mean to have type BFloat16 but got Float", torch 2.11). So
    scale and shift are widened here, on every device; the input stays as it is.

    Attributes:
        is_frozen: normalises by the running statistics in training too; scale and shift are trained.
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
        """[B, C, ...] -> the same shape and dtype; counts a batch and moves the statistics where it learns them."""
        mean, variance = self.running_mean, self.running_var
        weight, bias = (None if tensor is None else tensor.to(dtype=mean.dtype) for tensor in (self.weight, self.bias))
        if self.is_frozen or not self.training:
            return F.batch_norm(input, mean, variance, weight, bias, False, 0.0, self.eps)
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        return F.batch_norm(input, mean, variance, weight, bias, True, share, self.eps)


def num_groups(num_channels: int) -> int:
    """The most groups, 32 at most, of equal size and at least four channels; one where that cannot be."""
    most = min(MAX_GROUPS, num_channels // MIN_CHANNELS_A_GROUP)
    return next((count for count in range(most, 1, -1) if num_channels % count == 0), 1)


def replace_batch_norm(model: nn.Module, kind: str) -> None:
    """Replaces the model's BatchNorm layers in place by what `kind` (batch, frozen or group) means.

    Scale and shift are kept. GroupNorm has no running statistics, so a trained model has to learn on. A layer that
    keeps no statistics stays as it is: it has nothing to freeze, and answers from its batch alone.
    """
    for layer in list(model.modules()):
        for name, child in list(layer.named_children()):
            if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
                if kind == "group":
                    setattr(layer, name, _group_norm(child))
                elif child.track_running_stats:
                    setattr(layer, name, BatchNorm(child, is_frozen=kind == "frozen"))


def has_batch_norm(model: nn.Module) -> bool:
    """Whether any of its layers is one."""
    return any(isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | BatchNorm) for layer in model.modules())


def _group_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d) -> nn.GroupNorm:
    group = nn.GroupNorm(num_groups(layer.num_features), layer.num_features, layer.eps, device=torch.device("meta"))
    group.weight, group.bias = layer.weight, layer.bias
    return group
