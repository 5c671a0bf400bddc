"""A student's saved buffers (BatchNorm's running statistics) where an update is left out: as they were before it."""

from __future__ import annotations

from typing import final

import torch
from accelerate.utils.modeling import get_non_persistent_buffers
from torch import Tensor, nn


@final
class BufferRollback:
    """The persistent buffers of a prepared student, under any engine, with a copy of them from the last update taken.

    A forward pass moves running statistics before anybody knows whether the update will be left out, and one that is
    not finite would leave NaN in them for good. Where there are no such buffers, nothing is done.
    """

    def __init__(self, student: nn.Module) -> None:
        fleeting = get_non_persistent_buffers(student, recurse=True, fqns=True)
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for name, buffer in student.named_buffers():
            if name not in fleeting and buffer.numel():
                groups.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        self._groups = [(buffers, _joined(buffers)) for buffers in groups.values()]

    def keep_or_restore(self, is_skipped: Tensor) -> None:
        """Puts the buffers back if the update was skipped (1 in a float32 scalar on the device), else copies them.

        Three kernels a device and dtype, whichever it was: the host does not wait. Does not communicate.
        """
        with torch.no_grad():
            for number, (buffers, before) in enumerate(self._groups):
                now = _joined(buffers)
                # FSDP1 may move them in its first forward pass. Selected, not multiplied: a NaN must go.
                kept = torch.where(is_skipped.to(now.device) > 0, before.to(now.device, now.dtype), now)
                parts = kept.split([buffer.numel() for buffer in buffers])
                torch._foreach_copy_(
                    buffers, [part.view(buffer.shape) for part, buffer in zip(parts, buffers, strict=True)]
                )
                self._groups[number] = (buffers, kept)


def _joined(buffers: list[Tensor]) -> Tensor:
    return torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
