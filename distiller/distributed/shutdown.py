"""Signals that ask a run to stop: the loop reads which one came, and a time limit ends the process.

A rank that waits in a collective or for a GPU runs no Python signal handlers, so they cannot enforce the limit. Python
also writes each signal's number into a pipe (its wakeup descriptor), and a thread that reads it ends the process when
the time is up.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

from distiller.distributed.process import (
    PARENT_GONE,
    STOP_SIGNALS,
    is_main_process,
    print_to_stderr,
    rank,
    signal_when_launcher_dies,
)
from distiller.distributed.rank_failure import describe_lost_ranks, is_first_to_report, missing_ranks, write_error_file
from distiller.errors import StoppedError

GRACE_S = 25.0
"""From the first signal to the end of the process. torch's agent kills its ranks 30 s after its own signal."""

_END = 0
"""Written into the pipe to end the thread; no signal has this number."""

DUPLICATE_SIGNAL_S = 2.0
"""A signal may arrive twice, from the launcher and to the process group; a later one is a second request."""


@final
class StopSignals:
    """The stop signals of this process. Nothing is caught until `listen` is called."""

    def __init__(self) -> None:
        self.requested = 0
        """Number of the first signal; 0 before it."""
        self._is_deferred = False
        self._is_training = True
        self._handlers: dict[int, Any] = {}

    def listen(self, is_training: bool = True) -> None:
        """Catches `STOP_SIGNALS` and the launcher's death from now on. Called in the main thread.

        `is_training`: whether the command can be continued by --resume, as the messages then say.
        """
        self._is_training = is_training
        for number in (*STOP_SIGNALS, PARENT_GONE):
            # nohup's ignored SIGHUP stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._handle)
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        signal_when_launcher_dies()

    def close(self) -> None:
        """Restores the previous signal handlers."""
        if not self._handlers:
            return
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        # A byte, not closing the pipe: processes that were forked meanwhile keep it open.
        os.write(self._writer, bytes([_END]))
        self._thread.join()
        self._handlers = {}
        os.close(self._writer)
        os.close(self._reader)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """In this block a signal only sets `requested`. Outside, and at the block's end, it raises StoppedError."""
        self.defer()
        yield
        self._is_deferred = False
        if self.requested:
            self._raise("after the last step")

    def defer(self) -> None:
        """From now on a signal only sets `requested`; for a process that is about to end."""
        self._is_deferred = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = self.requested or number
        if not self._is_deferred:
            self._raise("outside of the training loop")

    def _raise(self, when: str) -> None:
        # A copy of the signal must not interrupt the report.
        self.defer()
        text = f"stopped by {signal_name(self.requested)}; start it again"
        if self._is_training:
            text = f"stopped by {signal_name(self.requested)} {when}; continue with --resume"
        raise StoppedError(text, self.requested, is_agreed=False)

    def _watch(self) -> None:
        deadline = None
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._reader], [], [], left_s)[0]:
                work = "the update under way and its checkpoint" if self._is_training else "the command"
                self._end(f"{work} took longer than {GRACE_S:.0f} s")
            (number,) = os.read(self._reader, 1)
            if number == _END:
                return
            if number not in self._handlers:
                # Python writes every signal that has a handler, torch's for ended loader processes too.
                continue
            if deadline is None:
                self.requested = self.requested or number
                deadline = time.monotonic() + GRACE_S
            elif number != PARENT_GONE and time.monotonic() > deadline - GRACE_S + DUPLICATE_SIGNAL_S:
                self._end("a second signal came")

    def _end(self, why: str) -> None:
        """Ends the process from the watching thread, whatever the main thread waits for and reporting comes to."""
        try:
            if missing_ranks():
                text = describe_lost_ranks("")
            else:
                advice = "continue with --resume" if self._is_training else "start it again"
                text = f"{signal_name(self.requested)}, and {why}; killed, {advice}"
            reason = f"distiller, rank {rank()}: {text}"
            if is_first_to_report(reason):
                who = "distiller" if is_main_process() else f"distiller, rank {rank()}"
                print_to_stderr(f"{who}: {text}")
            write_error_file(reason, is_own=False)
        finally:
            os._exit(128 + self.requested)


def signal_name(number: int) -> str:
    """The signal's name for messages, such as SIGTERM."""
    return "the launcher's death" if number == PARENT_GONE else signal.Signals(number).name


NO_STOP_SIGNALS = StopSignals()
"""For callers that do not handle signals; never set."""
