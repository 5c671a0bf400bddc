"""Writes one checkpoint in the background: a thread on every rank, and no collective in any of them.

Each rank's thread writes its file and then a report on it (JSON). Rank 0's waits for all reports, writes progress.json
and renames the folder. A thread that fails writes the failure into its report. If the report cannot be written either,
the main threads exchange the failure at the next save, and rank 0's thread stops waiting.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from distiller.checkpoint.best import Best, read_best
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
from distiller.distributed.process import print_to_stderr
from distiller.storage.durable_writes import sync_folder, write_durably

_POLL_S = 0.02


@final
@dataclass(frozen=True)
class CheckpointTarget:
    """A checkpoint to write.

    Attributes:
        target: its folder.
        keep: number of newest checkpoints to keep, this one included; the best one is kept beside them.
        num_bytes: what all ranks together will write.
        best: this one, where it is the best one so far.
    """

    target: Path
    keep: int
    num_bytes: int
    best: Best | None = None

    @property
    def partial(self) -> Path:
        """The folder's name until it is complete."""
        return self.target.with_name(f".{self.target.name}.partial")


@final
class CheckpointWriter:
    """The thread of one rank; it starts at once. The main thread calls `own_failure`, then `finish`."""

    def __init__(
        self,
        checkpoint: CheckpointTarget,
        snapshot: Snapshot,
        rank: int,
        world_size: int,
        progress: Callable[[dict[str, StoredFile]], Progress],
        report_failure: Callable[[str], None],
    ) -> None:
        self._checkpoint, self._snapshot, self._rank, self._world_size = checkpoint, snapshot, rank, world_size
        self._progress, self._report_failure = progress, report_failure
        self._is_written, self._is_aborted = threading.Event(), threading.Event()
        self._own_failure: str | None = None
        self._failure: str | None = None
        # Daemon: a rank that exits must not wait for other ranks, which may be dead.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def own_failure(self) -> str | None:
        """Waits for this rank's file; why it could not be written, or None."""
        self._is_written.wait()
        return self._own_failure

    def finish(self, failures: list[str | None]) -> str | None:
        """Waits for the thread, given every rank's `own_failure`; why the checkpoint could not be written, or None."""
        failed = next((failure for failure in failures if failure is not None), None)
        if failed is not None:
            self._is_aborted.set()
        self._thread.join()
        failure = failed or self._failure
        if failure is not None:
            # Again, now that no rank writes any more: a file written during the first removal makes that fail.
            shutil.rmtree(self._checkpoint.partial, ignore_errors=True)
        return failure

    def join(self, limit_s: float) -> None:
        """Waits for the thread, at most so long."""
        self._thread.join(limit_s)

    def _run(self) -> None:
        try:
            self._write_own()
        except Exception as error:
            self._own_failure = self._own_failure or failure_message(error, self._checkpoint)
        finally:
            # Also after a failure, since the main thread waits for it.
            self._is_written.set()
        if self._rank == 0:
            try:
                self._failure = self._complete()
            except Exception as error:
                self._failure = failure_message(error, self._checkpoint)
            if self._failure is not None:
                shutil.rmtree(self._checkpoint.partial, ignore_errors=True)
                self._report_failure(self._failure)

    def _write_own(self) -> None:
        """Writes this rank's file and the report on it, or on the failure."""
        file = self._checkpoint.partial / rank_file(self._rank, self._world_size)
        report: dict[str, Any]
        try:
            report = asdict(self._snapshot.write(file))
        except Exception as error:
            self._own_failure = failure_message(error, self._checkpoint)
            report = {"failure": self._own_failure}
            # Frees space for the report. Suppressed, since the file system itself may have failed.
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        write_durably(self._report_file(self._rank), json.dumps(report))

    def _complete(self) -> str | None:
        """On rank 0: makes the checkpoint complete; why that is not possible, or None."""
        files: dict[str, StoredFile] = {}
        for rank in range(self._world_size):
            report = self._wait_for_report(rank)
            if report is None:
                return self._own_failure or "a rank could not write its file"
            if "failure" in report:
                return report["failure"]
            files[rank_file(rank, self._world_size)] = StoredFile(**report)
        for rank in range(self._world_size):
            self._report_file(rank).unlink()
        target, partial = self._checkpoint.target, self._checkpoint.partial
        write_durably(partial / PROGRESS_FILE, dump_progress(self._progress(files)))
        sync_folder(partial)
        remove_checkpoint(target)
        partial.rename(target)
        sync_folder(target.parent)
        write_durably(target.parent / LATEST_FILE, target.name)
        if self._checkpoint.best is not None:
            self._checkpoint.best.write(target.parent)
        sync_folder(target.parent)
        self._remove_old(self._checkpoint.keep)
        return None

    def _remove_old(self, keep: int) -> None:
        checkpoints = self._checkpoint.target.parent
        best = read_best(checkpoints)
        for step in steps_in(checkpoints)[:-keep]:
            if best is not None and step == best.step:
                continue
            old = self._checkpoint.target.with_name(f"step-{step}")
            try:
                remove_checkpoint(old)
            except OSError as error:
                print_to_stderr(f"distiller: {old} cannot be removed ({error.strerror})")

    def _wait_for_report(self, rank: int) -> dict[str, Any] | None:
        while not self._is_aborted.is_set():
            try:
                return json.loads(self._report_file(rank).read_text(encoding="utf-8"))
            except FileNotFoundError:
                time.sleep(_POLL_S)
        return None

    def _report_file(self, rank: int) -> Path:
        return self._checkpoint.partial / f"{rank_file(rank, self._world_size)}.json"


def remove_checkpoint(folder: Path) -> None:
    """Renames the folder before removing it: a half-removed checkpoint must not look like a damaged one.

    Of a link to a checkpoint elsewhere only the link is removed.
    """
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        removed = folder.with_name(f".{folder.name}.removed.partial")
        shutil.rmtree(removed, ignore_errors=True)
        folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Removes a folder, or a link to one; not what the link leads to."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def failure_message(error: Exception, checkpoint: CheckpointTarget) -> str:
    """The folder and the reason; where space is lacking, also the bytes needed and the bytes free."""
    if not isinstance(error, OSError):
        return f"{checkpoint.target}: {type(error).__name__}: {error}"
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return no_space_message(checkpoint, reason)
    return f"{checkpoint.target}: {reason}"


def no_space_message(checkpoint: CheckpointTarget, reason: str) -> str:
    """`reason` with the bytes that the checkpoint needs and, where the file system tells, the bytes free."""
    text = f"{checkpoint.target}: {reason}; {checkpoint.num_bytes:,} bytes are needed"
    with contextlib.suppress(OSError):
        text += f" and {shutil.disk_usage(checkpoint.target.parent).free:,} are free"
    return text
