"""What watches the updates of a session: times, profiles, attention kernels, compilation, memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

from distiller.training.attention_kernels import AttentionNotice
from distiller.training.expectation import ExpectationNotice
from distiller.training.out_of_memory import AllocationRecorder
from distiller.training.profiling import StepProfiler
from distiller.training.recompilations import RecompilationNotice
from distiller.training.run import Run
from distiller.training.timing import StepTimer


@final
@dataclass(frozen=True)
class Observers:
    """The observers of one session. None of them communicates."""

    timer: StepTimer
    profiler: StepProfiler
    attention: AttentionNotice
    recompilations: RecompilationNotice
    allocations: AllocationRecorder
    expectation: ExpectationNotice

    @classmethod
    def of(cls, run: Run) -> Observers:
        """As the run's recipe asks."""
        steps, ranks, first_step = run.recipe.profile.steps, run.ranks, run.first_step
        return cls(
            StepTimer(run.accelerator.device),
            StepProfiler(steps, Path(run.recipe.output_dir), ranks, first_step),
            AttentionNotice(steps, ranks, first_step),
            RecompilationNotice(ranks, first_step),
            AllocationRecorder(run),
            ExpectationNotice(run.expectation, ranks, first_step),
        )

    @property
    def place(self) -> str:
        """In words, the update that was begun last, and its part that goes on or has failed."""
        part = self.timer.current_part
        return f"update {self.step}" + ("" if part is None else f", {part}")

    @property
    def step(self) -> int:
        """The update that was begun last."""
        return self.allocations.step

    def begin(self, step: int) -> None:
        """Before update `step`."""
        self.allocations.begin(step)
        self.profiler.begin(step)
        self.attention.begin(step)

    def end(self, step: int) -> None:
        """After update `step`. What `attention` has profiled is read by `attention.end`."""
        self.timer.end_step()
        self.profiler.end(step)
        self.recompilations.end(step)
        self.allocations.end(step)
        self.expectation.end(step)

    def close(self) -> None:
        """Ends recordings, and the profiles of an update that failed, of which torch complains at the process's end."""
        self.profiler.close()
        self.attention.close()
        self.allocations.close()
