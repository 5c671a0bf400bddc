"""Says what used up a GPU's memory and what would free some, and writes torch's snapshot of its allocator."""

from __future__ import annotations

from pathlib import Path
from typing import final

import torch

from distiller.config.placements import PLACEMENTS
from distiller.errors import RunError
from distiller.training.memory_advice import Shortage, Situation, owners, remedies
from distiller.training.profiling import FOLDER
from distiller.training.run import Run

MAX_EVENTS = 100_000
"""Allocations and frees that a snapshot holds, the newest ones."""
RECORDED_UPDATES = 2
"""Of a session, whose allocations are recorded: by the second everything that lasts is there."""


@final
class AllocationRecorder:
    """Records where memory was allocated in a session's first updates, for a snapshot. Does not communicate.

    Recording costs a few microseconds for every allocation, so it ends after `RECORDED_UPDATES`, unless the recipe's
    `profile.memory` keeps it on. Does nothing without a GPU.
    """

    def __init__(self, run: Run) -> None:
        self._on_gpu, self._goes_on = run.accelerator.device.type == "cuda", run.recipe.profile.memory
        self._first, self._last = run.first_step, run.first_step + RECORDED_UPDATES - 1
        self.step = run.first_step

    def begin(self, step: int) -> None:
        """Before update `step`."""
        self.step = step
        if self._on_gpu and step == self._first:
            torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS, stacks="python")

    def end(self, step: int) -> None:
        """After update `step`."""
        if self._on_gpu and step == self._last and not self._goes_on:
            torch.cuda.memory._record_memory_history(enabled=None)


def explain(error: torch.OutOfMemoryError, run: Run, place: str, prefetched_bytes: int) -> RunError:
    """The error as one line, with advice; writes `profile/out-of-memory-rank-R.pickle`. Does not communicate.

    Args:
        place: in words, where the loop was.
        prefetched_bytes: of updates that the teacher has answered ahead.
    """
    shortage, situation = Shortage.of(str(error)), situation_of(run, prefetched_bytes)
    text = f"out of GPU memory in {place}"
    if shortage.asked is not None and shortage.capacity is not None:
        free = (shortage.free or 0) / 2**20
        text += (
            f": {shortage.asked / 2**20:.0f} MiB more were asked for and {free:.0f} MiB are free of "
            f"{shortage.capacity / 2**30:.1f} GiB"
        )
    if held := owners(situation, shortage):
        text += f" ({held})"
    text += f"; what frees memory, cheapest first: {'; '.join(remedies(situation, shortage))}"
    if (file := _write_snapshot(run)) is not None:
        text += f". Allocations: {file}"
    return RunError(text)


def situation_of(run: Run, prefetched_bytes: int) -> Situation:
    """What the run holds on this rank's GPU."""
    recipe, options = run.recipe, run.recipe.teacher
    is_quantizable = options.quantization == "none" and run.placement in PLACEMENTS
    return Situation(
        placement=None if run.teacher is None else run.placement,
        teacher=0 if run.teacher is None else run.teacher.memory().gpu_bytes + run.replicated_head_bytes,
        prefetched=prefetched_bytes,
        planned=run.planned_memory,
        offloading=_offloading(run.engine),
        batch_size=recipe.train.batch_size,
        samples_per_update=run.plan.samples_per_update,
        accumulation_steps=recipe.train.gradient_accumulation_steps,
        recomputes=recipe.train.gradient_checkpointing,
        can_quantize=is_quantizable and not PLACEMENTS[run.placement].why_not_quantized,
    )


def _offloading(engine: str) -> str | None:
    if engine.endswith("-offload"):
        return None
    return f"{engine}_offload.yaml" if engine.startswith("fsdp") else "zero2_offload.yaml"


def _write_snapshot(run: Run) -> Path | None:
    if run.accelerator.device.type != "cuda":
        return None
    file = Path(run.recipe.output_dir) / FOLDER / f"out-of-memory-rank-{run.ranks.rank}.pickle"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(file))
    except (OSError, RuntimeError):
        # The disk may be full as well; the memory is what the user has to hear about.
        return None
    return file
