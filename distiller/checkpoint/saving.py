"""Saving a run's state while it goes on, and putting a saved one back."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from distiller.checkpoint.format import Identity, Progress, Spent, StoredFile, StoredKind, steps_in
from distiller.checkpoint.gathering import whole_on_main
from distiller.checkpoint.reading import CheckpointReader
from distiller.checkpoint.snapshot import Snapshot
from distiller.checkpoint.writing import Place, Writing, lacking
from distiller.distributed.ranks import Ranks
from distiller.errors import AgreedError, CheckpointError, UserError
from distiller.student_state.base import KINDS, Piece, StudentState
from distiller.student_state.moving_average import MovingAverage

_OLDER_EXPORT_FOLDER = "export"
"""Where an older version put the student's pieces when there was no last checkpoint."""
_NOTHING = Spent()
_HEADER_BYTES = 2**20
"""Room for what is not tensors: headers, notes and progress.json."""


class Checkpoints:
    """The checkpoints of one run. The teacher is in none of them: it was never prepared.

    Attributes:
        num_failed: saves that this session gave up so far, on every rank.
        spent_before: what the sessions took that led to the checkpoint that was loaded.
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
        self._under_way: Writing | None = None
        self.num_failed = 0
        self.spent_before = Spent()

    def reserve(self) -> None:
        """Allocates the snapshot's memory now, so that the first save costs the loop no more than the others.

        Every rank calls it. Communicates from host to host; AgreedError where a rank has no such memory.
        """
        num_bytes = self._own_bytes()
        self._ranks.all_succeed(lambda: self._snapshot.reserve(num_bytes))

    def total_bytes(self) -> int:
        """What one checkpoint takes on the disk, of all ranks. Every rank calls it. Communicates from host to host."""
        return sum(self._ranks.gather(self._own_bytes() + _HEADER_BYTES))

    def _own_bytes(self) -> int:
        """Of this rank's weights, both moments and moving average."""
        weights = sum(piece.values.nbytes for piece in self._state.pieces("weights"))
        return weights * (3 if self._average is None else 4)

    def remove_stale(self) -> None:
        """Removes what runs that died left half-written. Rank 0 calls it, before anything is saved."""
        for partial in (*self._folder.glob(".*.partial"), *self._folder.glob(_OLDER_EXPORT_FOLDER)):
            shutil.rmtree(partial)

    def save(self, step: int, skipped_steps: int, wait: bool = False, spent: Spent = _NOTHING) -> None:
        """Copies the state to host memory; threads write it. First waits for the save before, if it is under way.

        Every rank calls it. Communicates from host to host. A save that cannot be completed is said on stderr and
        counted, and leaves nothing behind; the ones before it stay.

        Args:
            step: updates done.
            skipped_steps: of these, the ones that an fp16 scaler skipped.
            spent: what this session took so far.
            wait: return when the checkpoint is complete on the disk; CheckpointError when it cannot be.
        """
        self.finish()
        place = self._begin(self._folder / f"step-{step}")
        if isinstance(place, Place):
            announce = _keep_quiet if wait else self._announce
            self._under_way = self._write(place, step, skipped_steps, self.spent_before + spent, announce)
            failure = self._finish() if wait else None
        else:
            failure = place
            if self._ranks.is_main and not wait:
                self._announce(failure)
        if failure is not None:
            self.num_failed += 1
            if wait:
                raise CheckpointError(f"the checkpoint was not written: {failure}; {self._what_is_left()}")

    def finish(self) -> None:
        """Waits until no save is under way. Every rank calls it. Communicates."""
        if self._finish() is not None:
            self.num_failed += 1

    def load(self, step: int) -> int:
        """Puts `step-N` into student, optimizer and average, and returns the steps skipped until then.

        Every rank calls it, for a checkpoint whose digests hold. Communicates under ZeRO. UserError, on every rank,
        where it is another student's.
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
        """The folder of `step-N`, of which a `CheckpointReader` reads the trained student; None if there is none.

        Communicates.
        """
        saved = self._folder / f"step-{step}"
        return saved if self._ranks.broadcast_from_main(saved.is_dir) else None

    def gathered_result(self) -> dict[str, Tensor]:
        """The trained student's whole tensors (CPU) on rank 0, {} on the others, without any file.

        Every rank calls it, when the last save is finished. Communicates. AgreedError where a rank lacks the memory.
        """
        kind: StoredKind = "weights" if self._average is None else "average"
        self._ranks.all_succeed(lambda: self._snapshot.take(self._pieces([kind])))
        return whole_on_main(self._snapshot, self._state.shapes, self._ranks)

    def _open(self, step: int) -> CheckpointReader:
        folder = self._folder / f"step-{step}"
        reader = CheckpointReader(folder)
        theirs, ours = reader.progress.shapes, self._state.shapes
        for name in theirs.keys() | ours.keys():
            if theirs.get(name) != ours.get(name):
                raise UserError(
                    f"--resume: {folder} has {name} of shape {theirs.get(name)} and the student {ours.get(name)}; "
                    "begin another run with output_dir=..."
                )
        return reader

    def _begin(self, target: Path) -> Place | str:
        """Takes the snapshot and makes the folder; or says why there is no use in writing."""
        try:
            self._ranks.all_succeed(lambda: self._snapshot.take(self._pieces([*KINDS, "average"])))
        except AgreedError as error:
            return f"{target}: {error}"
        num_bytes = sum(self._ranks.gather(self._snapshot.num_bytes + _HEADER_BYTES))
        place = Place(target, self._keep, num_bytes)
        refusal = self._ranks.broadcast_from_main(lambda: _make_room(place))
        return place if refusal is None else refusal

    def _write(
        self, place: Place, step: int, skipped_steps: int, spent: Spent, announce: Callable[[str], None]
    ) -> Writing:
        counters, shapes = self._state.counters(), self._state.shapes

        def progress(files: dict[str, StoredFile]) -> Progress:
            return Progress(step, skipped_steps, counters, self._identity, shapes, files, spent)

        return Writing(place, self._snapshot, self._ranks.rank, self._ranks.world_size, progress, announce)

    def _pieces(self, kinds: list[StoredKind]) -> Iterator[tuple[StoredKind, Piece]]:
        for kind in kinds:
            if kind != "average":
                for piece in self._state.pieces(kind):
                    yield kind, piece
            elif self._average is not None:
                for piece in self._average.pieces():
                    yield kind, piece

    def _finish(self) -> str | None:
        writing, self._under_way = self._under_way, None
        if writing is None:
            return None
        failures = self._ranks.gather(writing.own_failure())
        return self._ranks.broadcast_from_main(lambda: writing.finish(failures))

    def _announce(self, failure: str) -> None:
        line = f"distiller: a checkpoint was not written, training goes on: {failure}; {self._what_is_left()}"
        print(line, file=sys.stderr, flush=True)

    def _what_is_left(self) -> str:
        try:
            steps = steps_in(self._folder)
        except OSError as error:
            return f"{self._folder} cannot be read ({error.strerror})"
        return f"the newest one is step-{steps[-1]}" if steps else "there is none yet"


def _keep_quiet(failure: str) -> None:
    """For a failure that the main threads raise."""


def _make_room(place: Place) -> str | None:
    """Rank 0 makes the folder, unless the disk is too full for what is to come; then it says so."""
    try:
        shutil.rmtree(place.partial, ignore_errors=True)
        place.partial.mkdir(parents=True)
        free = shutil.disk_usage(place.partial).free
    except OSError as error:
        return f"{place.target}: {error.strerror}"
    if free < place.num_bytes:
        place.partial.rmdir()
        return lacking(place, "the disk is full")
    return None
