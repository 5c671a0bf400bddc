"""Restores a student's persistent buffers (BatchNorm's running statistics) when an update is skipped."""

from __future__ import annotations

from typing import final

import torch
from accelerate.utils.modeling import get_non_persistent_buffers
from torch import Tensor, nn


@final
class BufferRollback:
    """A copy of a prepared student's persistent buffers after the last update that was not skipped; any engine.

    A forward pass changes running statistics before it is known whether the update is skipped, and non-finite
    activations would leave NaN in them. Does nothing for a student without such buffers.
    """

    def __init__(self, student: nn.Module) -> None:
        non_persistent = get_non_persistent_buffers(student, recurse=True, fqns=True)
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for name, buffer in student.named_buffers():
            if name not in non_persistent and buffer.numel():
                groups.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        self._groups = [(buffers, _concatenate(buffers)) for buffers in groups.values()]

    def keep_or_restore(self, is_skipped: Tensor) -> None:
        """Restores the buffers if `is_skipped` (float32 scalar on the device) is 1, else copies them.

        Three kernels a device and dtype in either case; the host does not wait. Does not communicate.
        """
        with torch.no_grad():
            for i, (buffers, before) in enumerate(self._groups):
                current = _concatenate(buffers)
                # FSDP1 may move buffers in its first forward pass. torch.where, not a product, which would keep NaN.
                kept = torch.where(is_skipped.to(current.device) > 0, before.to(current.device, current.dtype), current)
                parts = kept.split([buffer.numel() for buffer in buffers])
                torch._foreach_copy_(
                    buffers, [part.view(buffer.shape) for part, buffer in zip(parts, buffers, strict=True)]
                )
                self._groups[i] = (buffers, kept)


def _concatenate(buffers: list[Tensor]) -> Tensor:
    return torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
