"""Saves a run's state while training continues, and loads a saved one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

from torch import Tensor

from distiller.checkpoint.best import Best
from distiller.checkpoint.format import Identity, Progress, SessionTotals, StoredFile, StoredKind, steps_in
from distiller.checkpoint.gathering import whole_on_main
from distiller.checkpoint.reading import CheckpointReader
from distiller.checkpoint.snapshot import Snapshot
from distiller.checkpoint.writing import CheckpointTarget, CheckpointWriter, no_space_message, remove_folder
from distiller.distributed.process import print_to_stderr
from distiller.distributed.ranks import Ranks
from distiller.errors import AgreedError, CheckpointError, UserError
from distiller.student_state.base import KINDS, Piece, StudentState
from distiller.student_state.moving_average import MovingAverage

_OLDER_EXPORT_FOLDER = "export"
"""Where an older version wrote the student's pieces when there was no last checkpoint."""
_NO_TOTALS = SessionTotals()
_HEADER_BYTES = 2**20
"""Upper bound for what is not tensors: headers, reports and progress.json."""


@final
class Checkpoints:
    """The checkpoints of one run. They do not hold the teacher, which is never prepared.

    Attributes:
        num_failed: saves that failed in this session so far; the same on every rank.
        spent_before: totals of the sessions before the loaded checkpoint.
    """

    def __init__(
        self,
        run_dir: Path,
        ranks: Ranks,
        keep: int,
        identity: Identity,
        state: StudentState,
        average: MovingAverage | None,
    ) -> None:
        self._folder, self._ranks, self._keep, self._identity = run_dir / "checkpoints", ranks, keep, identity
        self._state, self._average = state, average
        self._snapshot = Snapshot(ranks.device)
        self._writer: CheckpointWriter | None = None
        self.num_failed = 0
        self.spent_before = SessionTotals()

    def reserve(self) -> None:
        """Allocates the snapshot's memory now, so that the first save takes no longer than the others.

        Every rank calls it. Communicates from host to host. Raises AgreedError where a rank lacks the memory.
        """
        num_bytes = self._own_bytes()
        self._ranks.all_succeed(lambda: self._snapshot.reserve(num_bytes))

    def total_bytes(self) -> int:
        """Bytes of one checkpoint on the disk, of all ranks. Every rank calls it. Communicates from host to host."""
        return sum(self._ranks.gather(self._own_bytes() + _HEADER_BYTES))

    def _own_bytes(self) -> int:
        """Bytes of this rank's weights, both moments and moving average."""
        weights = sum(piece.values.nbytes for piece in self._state.pieces("weights"))
        return weights * (3 if self._average is None else 4)

    def remove_stale(self) -> None:
        """Removes incomplete checkpoints of earlier processes. Rank 0 calls it, before anything is saved."""
        for partial in (*self._folder.glob(".*.partial"), *self._folder.glob(_OLDER_EXPORT_FOLDER)):
            remove_folder(partial)

    def save(
        self,
        step: int,
        skipped_steps: int,
        wait: bool = False,
        spent: SessionTotals = _NO_TOTALS,
        best: Best | None = None,
    ) -> None:
        """Copies the state to host memory; threads write it. First waits for the save before, if it is still running.

        Every rank calls it. Communicates from host to host. A save that fails is reported on stderr and counted, and
        its files are removed; earlier checkpoints stay.

        Args:
            step: updates done.
            skipped_steps: how many of these an fp16 scaler skipped.
            wait: return when the checkpoint is complete on the disk, and raise CheckpointError if it fails.
            spent: totals of this session so far.
            best: this checkpoint, where it is the best one so far.
        """
        self.finish()
        checkpoint = self._begin(self._folder / f"step-{step}", best)
        if isinstance(checkpoint, CheckpointTarget):
            report = _ignore if wait else self._report_failure
            self._writer = self._start_writer(checkpoint, step, skipped_steps, self.spent_before + spent, report)
            failure = self._finish() if wait else None
        else:
            failure = checkpoint
            if self._ranks.is_main and not wait:
                self._report_failure(failure)
        if failure is not None:
            self.num_failed += 1
            if wait:
                raise CheckpointError(f"the checkpoint was not written: {failure}; {self._newest_message()}")

    def finish(self) -> None:
        """Waits for the save that is running, if any. Every rank calls it. Communicates."""
        if self._finish() is not None:
            self.num_failed += 1

    def wait_for_writer(self, limit_s: float) -> None:
        """Waits for this rank's thread if a save is running, at most so long. Does not communicate."""
        if self._writer is not None:
            self._writer.join(limit_s)

    def load(self, step: int) -> int:
        """Loads `step-N` into student, optimizer and average; returns the number of steps skipped until then.

        Every rank calls it, after `resuming.verify`. Communicates. Raises UserError, on every rank, where its shapes
        are not the student's.
        """
        reader = self._ranks.all_succeed(lambda: self._open(step))
        progress: Progress = reader.progress
        self._state.load(reader.read, progress.counters)
        self.spent_before = progress.spent
        if self._average is not None:
            self._average.load(lambda name, start, count: reader.read("average", name, start, count))
        reader.close()
        self._ranks.barrier()
        return progress.skipped_steps

    def saved_result(self, step: int) -> Path | None:
        """The folder of `step-N`, from which a `CheckpointReader` reads the trained student; None if there is none.

        Communicates.
        """
        saved = self._folder / f"step-{step}"
        return saved if self._ranks.broadcast_from_main(saved.is_dir) else None

    def gathered_result(self) -> dict[str, Tensor]:
        """The trained student's whole tensors (CPU) on rank 0, {} on the others, without files.

        Every rank calls it, when the last save is finished. Communicates. Raises AgreedError where a rank lacks memory.
        """
        kind: StoredKind = "weights" if self._average is None else "average"
        self._ranks.all_succeed(lambda: self._snapshot.take(self._pieces([kind])))
        return whole_on_main(self._snapshot, self._state.shapes, self._ranks)

    def _open(self, step: int) -> CheckpointReader:
        folder = self._folder / f"step-{step}"
        reader = CheckpointReader(folder)
        saved, own = reader.progress.shapes, self._state.shapes
        for name in saved.keys() | own.keys():
            if saved.get(name) != own.get(name):
                raise UserError(
                    f"--resume: {folder} has {name} of shape {saved.get(name)} and the student {own.get(name)}; "
                    "begin another run with output_dir=..."
                )
        return reader

    def _begin(self, target: Path, best: Best | None) -> CheckpointTarget | str:
        """Takes the snapshot and creates the partial folder; returns the reason if either fails."""
        try:
            self._ranks.all_succeed(lambda: self._snapshot.take(self._pieces([*KINDS, "average"])))
        except AgreedError as error:
            return f"{target}: {error}"
        num_bytes = sum(self._ranks.gather(self._snapshot.num_bytes + _HEADER_BYTES))
        checkpoint = CheckpointTarget(target, self._keep, num_bytes, best)
        failure = self._ranks.broadcast_from_main(lambda: _create_folder(checkpoint))
        return checkpoint if failure is None else failure

    def _start_writer(
        self,
        checkpoint: CheckpointTarget,
        step: int,
        skipped_steps: int,
        spent: SessionTotals,
        report_failure: Callable[[str], None],
    ) -> CheckpointWriter:
        counters, shapes = self._state.counters(), self._state.shapes

        def progress(files: dict[str, StoredFile]) -> Progress:
            return Progress(step, skipped_steps, counters, self._identity, shapes, files, spent)

        ranks = self._ranks
        return CheckpointWriter(checkpoint, self._snapshot, ranks.rank, ranks.world_size, progress, report_failure)

    def _pieces(self, kinds: list[StoredKind]) -> Iterator[tuple[StoredKind, Piece]]:
        for kind in kinds:
            if kind != "average":
                for piece in self._state.pieces(kind):
                    yield kind, piece
            elif self._average is not None:
                for piece in self._average.pieces():
                    yield kind, piece

    def _finish(self) -> str | None:
        writer, self._writer = self._writer, None
        if writer is None:
            return None
        failures = self._ranks.gather(writer.own_failure())
        return self._ranks.broadcast_from_main(lambda: writer.finish(failures))

    def _report_failure(self, failure: str) -> None:
        line = f"distiller: a checkpoint was not written, training goes on: {failure}; {self._newest_message()}"
        print_to_stderr(line)

    def _newest_message(self) -> str:
        try:
            steps = steps_in(self._folder)
        except OSError as error:
            return f"{self._folder} cannot be read ({error.strerror})"
        return f"the newest one is step-{steps[-1]}" if steps else "there is none yet"


def _ignore(failure: str) -> None:
    """Reports nothing: the main threads raise the failure."""


def _create_folder(checkpoint: CheckpointTarget) -> str | None:
    """On rank 0: creates the partial folder; the reason if it cannot, or if the disk has too little free space."""
    try:
        shutil.rmtree(checkpoint.partial, ignore_errors=True)
        checkpoint.partial.mkdir(parents=True)
        free = shutil.disk_usage(checkpoint.partial).free
    except OSError as error:
        return f"{checkpoint.target}: {error.strerror}"
    if free < checkpoint.num_bytes:
        checkpoint.partial.rmdir()
        return no_space_message(checkpoint, "the disk is full")
    return None
