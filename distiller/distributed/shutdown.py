"""Requests to stop: signals become a number that the loop reads, with a time limit on what it makes of it.

A rank that waits in a collective or for a GPU runs no Python, so signal handlers alone would be no limit. The kernel
writes each signal's number into a pipe as well, and a thread that reads it ends the process when the time is up.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from distiller.distributed.process import PARENT_GONE, STOP_SIGNALS, is_main_process, rank, signal_when_launcher_dies
from distiller.distributed.rank_failure import describe_lost_ranks, missing_ranks, reports_first, write_error_file
from distiller.errors import StoppedError

GRACE_S = 25.0
"""From the first signal to the end of the process; torch's agent kills its ranks 30 s after it was told to stop."""

_END = 0
"""No signal: tells the thread to end."""

ECHO_S = 2.0
"""Launcher and process group both pass a signal on; what comes later than this is a second request."""


class Stops:
    """What this process was asked. Until `listen` is called, nothing is caught."""

    def __init__(self) -> None:
        self.requested = 0
        """Number of the first signal, 0 before there is one."""
        self._is_deferred = False
        self._handlers: dict[int, Any] = {}

    def listen(self) -> None:
        """Catches `STOP_SIGNALS` and the launcher's death from here on; in the main thread."""
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
        """Gives the signals back."""
        if not self._handlers:
            return
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        # A byte, not the pipe's end: processes that were forked meanwhile hold it open.
        os.write(self._writer, bytes([_END]))
        self._thread.join()
        self._handlers = {}
        os.close(self._writer)
        os.close(self._reader)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, a signal only sets `requested`; elsewhere it raises StoppedError at once, as at this block's end."""
        self.defer()
        yield
        self._is_deferred = False
        if self.requested:
            self._raise("after the last step")

    def defer(self) -> None:
        """From here on a signal only sets `requested`: the process is about to end anyway."""
        self._is_deferred = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = self.requested or number
        if not self._is_deferred:
            # Once: the launcher's echo must not interrupt what the first one's exception passes through.
            self.defer()
            self._raise("outside of the training loop")

    def _raise(self, when: str) -> None:
        text = f"stopped by {signal_name(self.requested)} {when}; continue with --resume"
        raise StoppedError(text, self.requested, is_agreed=False)

    def _watch(self) -> None:
        deadline = None
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._reader], [], [], left_s)[0]:
                self._end(f"the update under way and its checkpoint took longer than {GRACE_S:.0f} s")
            (number,) = os.read(self._reader, 1)
            if number == _END:
                return
            if number not in self._handlers:
                # Python passes every signal that has a handler on, torch's of ended loader processes too.
                continue
            if deadline is None:
                self.requested = self.requested or number
                deadline = time.monotonic() + GRACE_S
            elif number != PARENT_GONE and time.monotonic() > deadline - GRACE_S + ECHO_S:
                self._end("a second signal came")

    def _end(self, why: str) -> None:
        """Ends the process from the thread, whatever the main thread waits for."""
        if missing_ranks():
            text = describe_lost_ranks("")
        else:
            text = f"{signal_name(self.requested)}, and {why}; killed, continue with --resume"
        reason = f"distiller, rank {rank()}: {text}"
        if reports_first(reason):
            who = "distiller" if is_main_process() else f"distiller, rank {rank()}"
            print(f"{who}: {text}", file=sys.stderr, flush=True)
        write_error_file(reason, is_own=False)
        os._exit(128 + self.requested)


def signal_name(number: int) -> str:
    """SIGTERM and the like, for a message."""
    return "the launcher's death" if number == PARENT_GONE else signal.Signals(number).name


NO_STOPS = Stops()
"""Nobody asks."""
