"""One checkpoint on its way to the disk: a thread on every rank, and no collective in any of them.

Each rank's thread writes its file and then a note of it. Rank 0's waits for everyone's note, writes progress.json and
gives the folder its name. A thread that fails says so in its note. If not even that can be written, the main threads
find out when they next meet, and rank 0's thread is told to stop waiting.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distiller.checkpoint.format import (
    LATEST_FILE,
    PROGRESS_FILE,
    Progress,
    StoredFile,
    dump_progress,
    rank_file,
    steps_in,
)
from distiller.checkpoint.snapshot import Snapshot
from distiller.storage.durable_writes import sync_folder, write_durably

_POLL_S = 0.02


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is to be, how many stay beside it, and what all ranks together will write.

    Attributes:
        keep: newest checkpoints that stay.
    """

    target: Path
    keep: int
    num_bytes: int

    @property
    def partial(self) -> Path:
        """Where it is until it is complete."""
        return self.target.with_name(f".{self.target.name}.partial")


class Writing:
    """Starts at once. `finish` is for the main thread."""

    def __init__(
        self,
        place: Place,
        snapshot: Snapshot,
        rank: int,
        world_size: int,
        progress: Callable[[dict[str, StoredFile]], Progress],
        announce: Callable[[str], None],
    ) -> None:
        self._place, self._snapshot, self._rank, self._world_size = place, snapshot, rank, world_size
        self._progress, self._announce = progress, announce
        self._is_written, self._is_hopeless = threading.Event(), threading.Event()
        self._own_failure: str | None = None
        self._failure: str | None = None
        # A rank that leaves in a hurry must not wait here for others that may be dead.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def own_failure(self) -> str | None:
        """Waits for this rank's file, and says why it could not be written."""
        self._is_written.wait()
        return self._own_failure

    def finish(self, failures: list[str | None]) -> str | None:
        """Waits for the thread, given what every rank's `own_failure` was; why there is no checkpoint, or None."""
        failed = next((failure for failure in failures if failure is not None), None)
        if failed is not None:
            self._is_hopeless.set()
        self._thread.join()
        failure = failed or self._failure
        if failure is not None:
            # Again, now that no rank writes any more: a file that appears in a folder being removed keeps it there.
            shutil.rmtree(self._place.partial, ignore_errors=True)
        return failure

    def _run(self) -> None:
        try:
            self._write_own()
        except Exception as error:
            self._own_failure = self._own_failure or described(error, self._place)
        finally:
            # Whatever happened: the main thread waits for it.
            self._is_written.set()
        if self._rank == 0:
            try:
                self._failure = self._complete()
            except Exception as error:
                self._failure = described(error, self._place)
            if self._failure is not None:
                shutil.rmtree(self._place.partial, ignore_errors=True)
                self._announce(self._failure)

    def _write_own(self) -> None:
        """This rank's file and its note; the note of a failure where there is no file."""
        file = self._place.partial / rank_file(self._rank, self._world_size)
        note: dict[str, Any]
        try:
            note = asdict(self._snapshot.write(file))
        except Exception as error:
            self._own_failure = described(error, self._place)
            note = {"failure": self._own_failure}
            # Room for the note, and for others. What failed may be the file system itself.
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        write_durably(self._note(self._rank), json.dumps(note))

    def _complete(self) -> str | None:
        files: dict[str, StoredFile] = {}
        for rank in range(self._world_size):
            note = self._wait_for_note(rank)
            if note is None:
                return self._own_failure or "a rank could not write its file"
            if "failure" in note:
                return note["failure"]
            files[rank_file(rank, self._world_size)] = StoredFile(**note)
        for rank in range(self._world_size):
            self._note(rank).unlink()
        target, partial = self._place.target, self._place.partial
        write_durably(partial / PROGRESS_FILE, dump_progress(self._progress(files)))
        sync_folder(partial)
        remove(target)
        partial.rename(target)
        sync_folder(target.parent)
        write_durably(target.parent / LATEST_FILE, target.name)
        sync_folder(target.parent)
        self._remove_old(self._place.keep)
        return None

    def _remove_old(self, keep: int) -> None:
        for step in steps_in(self._place.target.parent)[:-keep]:
            old = self._place.target.with_name(f"step-{step}")
            try:
                remove(old)
            except OSError as error:
                print(f"distiller: {old} cannot be removed ({error.strerror})", file=sys.stderr, flush=True)

    def _wait_for_note(self, rank: int) -> dict[str, Any] | None:
        while not self._is_hopeless.is_set():
            try:
                return json.loads(self._note(rank).read_text(encoding="utf-8"))
            except FileNotFoundError:
                time.sleep(_POLL_S)
        return None

    def _note(self, rank: int) -> Path:
        return self._place.partial / f"{rank_file(rank, self._world_size)}.json"


def remove(folder: Path) -> None:
    """Takes a complete folder's name away first: a half-removed checkpoint must not look like a damaged one."""
    if folder.exists():
        removed = folder.with_name(f".{folder.name}.removed.partial")
        shutil.rmtree(removed, ignore_errors=True)
        folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def described(error: Exception, place: Place) -> str:
    """A failure in words: the folder, and where it is for room, how much is needed and how much there is."""
    if not isinstance(error, OSError):
        return f"{place.target}: {type(error).__name__}: {error}"
    reason = error.strerror or str(error)
    return lacking(place, reason) if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"{place.target}: {reason}"


def lacking(place: Place, reason: str) -> str:
    """`reason`, with the bytes that a checkpoint needs and, where the file system says so, the ones that are free."""
    text = f"{place.target}: {reason}; {place.num_bytes:,} bytes are needed"
    with contextlib.suppress(OSError):
        text += f" and {shutil.disk_usage(place.target.parent).free:,} are free"
    return text
