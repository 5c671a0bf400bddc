"""Updates whose loss or gradient is not finite: skipped on every rank, counted and logged; too many end the run.

`nan_if_nonfinite` makes the gradient of a non-finite loss non-finite, and under every engine the gradient norm is the
same on every rank. So the norm alone decides, on the device, and the host does not wait. DeepSpeed and the fp16 scaler
check gradients and skip by themselves; elsewhere fused AdamW takes the decision as a tensor.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from accelerate import Accelerator
from torch import Tensor

from distiller.distributed.ranks import Ranks
from distiller.errors import AgreedError
from distiller.run_folder.files import BAD_BATCHES_FILE
from distiller.storage.line_file import LineFile

MAX_NAMED = 16
"""Sample ids in the error message; the file has all."""


@final
@dataclass(frozen=True)
class _Update:
    step: int
    sample_ids: tuple[int, ...]
    loss: Tensor
    is_bad: Tensor


def nan_if_nonfinite(scale: float, loss: Tensor) -> Tensor:
    """`scale`, exactly, for a finite loss; NaN otherwise, which reaches every gradient. float32 on its device."""
    return loss.detach().mul(0.0).add(scale)


@final
class NonFiniteGuard:
    """Counts skipped updates and ends the run after too many in a row.

    Attributes:
        num_skipped: updates that the optimizer skipped, in the whole run; float32 scalar on the device.
        was_bad: whether this rank's last update was bad (1) or not (0); float32 scalar on the device.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        ranks: Ranks,
        run_dir: Path,
        max_bad_steps: int,
        skipped: int,
        first_step: int,
    ) -> None:
        """`skipped`: updates skipped before `first_step`, where this session begins; later lines of the file go."""
        self._accelerator, self._ranks, self._max_bad_steps = accelerator, ranks, max_bad_steps
        self._file = LineFile(run_dir / BAD_BATCHES_FILE)
        if ranks.is_main:
            self._file.cut_back(first_step - 1)
        self._pending: deque[_Update] = deque()
        self._num_consecutive = 0
        self.num_skipped = torch.full((), float(skipped), device=accelerator.device)
        self.was_bad = torch.zeros((), device=accelerator.device)

    @property
    def last_was_finite(self) -> bool:
        """Whether the last update that has been observed was finite; the same on every rank."""
        return self._num_consecutive == 0

    def record(self, step: int, sample_ids: Sequence[int], losses: Sequence[Tensor], is_skipped: Tensor) -> None:
        """Adds an update, on the device; the host does not wait.

        In fp16 only a non-finite loss makes an update bad: overflowing gradients are normal there, the scaler skips the
        step and lowers its scale.
        """
        loss = torch.stack(list(losses)).sum()
        self.num_skipped += is_skipped
        in_fp16 = self._accelerator.mixed_precision == "fp16"
        self.was_bad = (~torch.isfinite(loss)).float() if in_fp16 else is_skipped
        self._pending.append(_Update(step, tuple(sample_ids), loss, self.was_bad))

    def observe(self, num_bad_ranks: int, step: int) -> None:
        """Evaluates update `step` by the number of ranks where it was bad. AgreedError after too many in a row.

        Communicates where the number is not 0.
        """
        while self._pending and self._pending[0].step <= step:
            update = self._pending.popleft()
            if update.step == step:
                self._count(update, num_bad_ranks > 0)

    def flush(self) -> None:
        """Evaluates every update that is pending; the host waits. Communicates. AgreedError after too many bad ones."""
        while self._pending:
            update = self._pending[0]
            total = self._accelerator.reduce(update.is_bad, "sum")
            self.observe(int(total), update.step)  # type: ignore[arg-type]

    def _count(self, update: _Update, is_bad: bool) -> None:
        if not is_bad:
            self._num_consecutive = 0
            return
        self._num_consecutive += 1
        loss = float(update.loss)
        parts = self._ranks.gather((loss if math.isfinite(loss) else str(loss), list(update.sample_ids)))
        if self._ranks.is_main:
            rows = [{"rank": rank, "loss": loss, "sample_ids": ids} for rank, (loss, ids) in enumerate(parts)]
            self._file.append("".join(json.dumps({"step": update.step, **row}) + "\n" for row in rows))
        if self._num_consecutive >= self._max_bad_steps:
            ids = [sample_id for _, part in parts for sample_id in part]
            named = ", ".join(map(str, ids[:MAX_NAMED])) + (", ..." if len(ids) > MAX_NAMED else "")
            what = f"{self._num_consecutive} updates in a row, up to step {update.step}, had"
            if self._num_consecutive == 1:
                what = f"step {update.step} had"
            raise AgreedError(
                f"{what} a loss or gradient that is not finite (optim.max_bad_steps {self._max_bad_steps}); the last "
                f"one's samples are {named}, {self._file.path} has all; lower optim.lr, set optim.max_grad_norm or "
                "look at these samples, then continue from the last good checkpoint with --resume"
            )
