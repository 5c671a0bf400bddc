"""What becomes of the student's BatchNorm layers (`student.batch_norm`).

With the statistics of its own micro-batch, a layer's answers depend on how an update is split: 8 samples at once and
2 x 4 differ by 1e-2 in the loss. Frozen statistics, and GroupNorm (Wu and He 2018), look at one sample at a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_GROUPS, MIN_CHANNELS_A_GROUP = 32, 4


class FrozenBatchNorm(nn.Module):
    """Normalises by the running statistics in training too; scale and shift are trained.

    Its tensors have the names of a BatchNorm layer's, whichever mode the module around it is in.
    """

    def __init__(self, layer: nn.BatchNorm1d | nn.BatchNorm2d) -> None:
        super().__init__()
        self.eps = layer.eps
        self.weight, self.bias = layer.weight, layer.bias
        self.register_buffer("running_mean", layer.running_mean)
        self.register_buffer("running_var", layer.running_var)
        self.register_buffer("num_batches_tracked", layer.num_batches_tracked)

    def forward(self, input: Tensor) -> Tensor:
        """[B, C, ...] -> the same shape and dtype."""
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


def num_groups(num_channels: int) -> int:
    """The most groups, 32 at most, of equal size and at least four channels; one where that cannot be."""
    most = min(MAX_GROUPS, num_channels // MIN_CHANNELS_A_GROUP)
    return next((count for count in range(most, 1, -1) if num_channels % count == 0), 1)


def replace_batch_norm(model: nn.Module, kind: str) -> None:
    """Replaces the model's BatchNorm layers in place by what `frozen` or `group` means; `batch` leaves them.

    Scale and shift are kept. GroupNorm has no running statistics, so a trained model has to learn on.
    """
    for layer in list(model.modules()) if kind != "batch" else ():
        for name, child in list(layer.named_children()):
            if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
                setattr(layer, name, FrozenBatchNorm(child) if kind == "frozen" else _group_norm(child))


def has_batch_norm(model: nn.Module) -> bool:
    """Whether any of its layers is one."""
    return any(isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) for layer in model.modules())


def _group_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d) -> nn.GroupNorm:
    group = nn.GroupNorm(num_groups(layer.num_features), layer.num_features, layer.eps, device=torch.device("meta"))
    group.weight, group.bias = layer.weight, layer.bias
    return group
