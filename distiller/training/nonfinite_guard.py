"""Updates whose loss or gradient is not finite: left out on every rank, counted, written down; too many end the run.

A loss that is not finite makes its gradient not finite (`spoil`), and the gradient's norm is the same on every rank of
every engine: so the norm alone decides, on the device, and nobody waits. DeepSpeed and fp16's scaler look at the
gradients themselves and skip; elsewhere fused AdamW takes the decision as a tensor.
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
from distiller.storage.line_file import LineFile

BAD_BATCHES_FILE = "bad_batches.jsonl"
MAX_NAMED = 16
"""Sample ids that a message names; the file has all."""


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
    """The updates of one run as they turn out. `num_skipped` counts all that the optimizer left out, on the device."""

    def __init__(self, accelerator: Accelerator, ranks: Ranks, run_dir: Path, max_bad_steps: int, skipped: int) -> None:
        self._accelerator, self._ranks, self._max_bad_steps = accelerator, ranks, max_bad_steps
        self._file = LineFile(run_dir / BAD_BATCHES_FILE)
        self._open: deque[_Update] = deque()
        self._num_in_a_row = 0
        self.num_skipped = torch.full((), float(skipped), device=accelerator.device)
        self.was_bad = torch.zeros((), device=accelerator.device)

    @property
    def last_was_finite(self) -> bool:
        """Whether the last update that is known of was taken; the same on every rank."""
        return self._num_in_a_row == 0

    def record(self, step: int, sample_ids: Sequence[int], losses: Sequence[Tensor], is_skipped: Tensor) -> None:
        """Takes an update in, on the device.

        With fp16 a gradient that overflows is the scaler's everyday business: it skips the step and lowers its scale.
        There a loss alone makes the update bad.
        """
        loss = torch.stack(list(losses)).sum()
        self.num_skipped += is_skipped
        in_fp16 = self._accelerator.mixed_precision == "fp16"
        self.was_bad = (~torch.isfinite(loss)).float() if in_fp16 else is_skipped
        self._open.append(_Update(step, tuple(sample_ids), loss, self.was_bad))

    def observe(self, num_bad_ranks: int, step: int) -> None:
        """Takes in how many ranks found update `step` bad. Communicates if any did. AgreedError after too many."""
        while self._open and self._open[0].step <= step:
            update = self._open.popleft()
            if update.step == step:
                self._count(update, num_bad_ranks > 0)

    def flush(self) -> None:
        """Asks about every update so far, and waits for the answer. Communicates. AgreedError after too many."""
        while self._open:
            update = self._open[0]
            total = self._accelerator.reduce(update.is_bad, "sum")
            self.observe(int(total), update.step)  # type: ignore[arg-type]

    def _count(self, update: _Update, is_bad: bool) -> None:
        if not is_bad:
            self._num_in_a_row = 0
            return
        self._num_in_a_row += 1
        loss = float(update.loss)
        parts = self._ranks.gather((loss if math.isfinite(loss) else str(loss), list(update.sample_ids)))
        if self._ranks.is_main:
            rows = [{"rank": rank, "loss": loss, "sample_ids": ids} for rank, (loss, ids) in enumerate(parts)]
            self._file.append("".join(json.dumps({"step": update.step, **row}) + "\n" for row in rows))
        if self._num_in_a_row >= self._max_bad_steps:
            ids = [sample_id for _, part in parts for sample_id in part]
            named = ", ".join(map(str, ids[:MAX_NAMED])) + (", ..." if len(ids) > MAX_NAMED else "")
            what = f"{self._num_in_a_row} updates in a row, up to step {update.step}, had"
            if self._num_in_a_row == 1:
                what = f"step {update.step} had"
            raise AgreedError(
                f"{what} a loss or gradient that is not finite (optim.max_bad_steps {self._max_bad_steps}); the last "
                f"one's samples are {named}, {self._file.path} has all; lower optim.lr, set optim.max_grad_norm or "
                "look at these samples, then continue from the last good checkpoint with --resume"
            )
