"""Says what used up a GPU's memory and what would free some, and writes torch's snapshot of its allocator."""

from __future__ import annotations

import os
from pathlib import Path
from typing import final

import torch

from distiller.config.placements import PLACEMENTS
from distiller.training.memory_advice import Shortage, Situation, owners, remedies
from distiller.training.profiling import FOLDER
from distiller.training.run import Run
from distiller.training.student_memory import WEIGHTS
from distiller.training.tracking import GIB

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
        self.step, self._is_on = run.first_step, False

    def begin(self, step: int) -> None:
        """Before update `step`."""
        self.step = step
        if self._on_gpu and step == self._first:
            # The place of a free is not recorded: for that torch 2.11 reads the Python stack while an exception passes,
            # and loses the one by which a recomputation of activations stops early (pytorch issue 179536).
            torch.cuda.memory._record_memory_history(context="alloc", max_entries=MAX_EVENTS, stacks="python")
            self._is_on = True

    def end(self, step: int) -> None:
        """After update `step`."""
        if step == self._last and not self._goes_on:
            self.close()

    def close(self) -> None:
        """Ends the recording; what was allocated until then keeps its place in a snapshot."""
        if self._is_on:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._is_on = False


def explain(message: str, run: Run, place: str, prefetched_bytes: int) -> str:
    """torch's message as one line with advice; writes `profile/out-of-memory-rank-R.pickle`. Does not communicate.

    Args:
        message: of a `torch.OutOfMemoryError`.
        place: in words, where the loop was.
        prefetched_bytes: of updates that the teacher has answered ahead.
    """
    shortage, situation = Shortage.of(message), situation_of(run, prefetched_bytes)
    own = run.accelerator.device.index
    is_own = None in (shortage.gpu, own) or shortage.gpu == own
    text = f"out of GPU memory in {place}"
    if shortage.asked is not None and shortage.capacity is not None:
        free = (shortage.free or 0) / 2**20
        text += (
            f": {shortage.asked / 2**20:.0f} MiB more were asked for and {free:.0f} MiB are free of "
            f"{shortage.capacity / GIB:.1f} GiB on GPU {shortage.gpu}"
        )
    if not is_own:
        text += (
            ", where another rank trains and a part of the teacher is; try smaller micro-batches, or a placement that "
            "does not spread the teacher"
        )
    else:
        held = owners(situation, shortage)
        found = remedies(situation, shortage) or ["no setting of the recipe; a smaller student, or more memory"]
        text += f"{f' ({held})' if held else ''}; what frees memory, cheapest first: {'; '.join(found)}"
    if (file := _write_snapshot(run)) is not None:
        text += f". Allocations: {file}"
    return text


def situation_of(run: Run, prefetched_bytes: int) -> Situation:
    """What the run holds on this rank's GPU."""
    recipe, options, spec = run.recipe, run.recipe.teacher, PLACEMENTS.get(run.placement)
    # Processes read each other's GPUs under a device map, where ranks share transfers, and where the teacher has
    # processes of its own; segments cannot be expanded then.
    shares_memory = spec is not None and (spec.uses_device_map or spec.name == "streamed")
    shares_memory = shares_memory and run.ranks.local_world_size > 1
    shares_memory = shares_memory or (spec is not None and spec.computes_elsewhere)
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    return Situation(
        placement=None if run.teacher is None else run.placement,
        teacher=0 if run.teacher is None else run.teacher.memory().gpu_bytes,
        head=run.replicated_head_bytes,
        prefetch_steps=options.prefetch_steps,
        prefetched=prefetched_bytes,
        planned=run.planned_memory,
        offloading=_offloading(run),
        may_expand=not shares_memory and "expandable_segments" not in allocator,
        batch_size=recipe.train.batch_size,
        samples_per_update=run.plan.samples_per_update,
        accumulation_steps=recipe.train.gradient_accumulation_steps,
        recomputes=recipe.train.gradient_checkpointing,
        can_quantize=options.quantization == "none" and spec is not None and not spec.why_not_quantized,
    )


def _offloading(run: Run) -> tuple[str, int] | None:
    state = run.planned_memory.student
    if run.engine.endswith("-offload"):
        return None
    if run.engine.startswith("fsdp"):
        return f"{run.engine}_offload.yaml", state
    if run.engine == "deepspeed-zero3":
        return "zero3_offload.yaml", state
    # Gradients and moments leave the GPU; float32 weights stay.
    return "zero2_offload.yaml", state - WEIGHTS * run.student_parameters


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
