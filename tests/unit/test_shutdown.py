"""Signals become a number; the thread that watches them ends with the command, whoever else holds its pipe."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from unittest.mock import Mock

import pytest

from distiller.distributed import shutdown
from distiller.distributed.shutdown import StopSignals
from distiller.errors import StoppedError


@pytest.fixture
def stops():
    made = StopSignals()
    made.listen()
    yield made
    made.close()


def test_closing_does_not_wait_for_loader_processes_that_live_on():
    """After an error their frames keep them alive, with copies of both ends of the pipe."""
    stops = StopSignals()
    stops.listen()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    closing = threading.Thread(target=lambda: os.write(stops._writer, b"\0"))
    closing.start()
    closing.join()
    stops._thread.join(timeout=5)
    is_watching = stops._thread.is_alive()
    child.kill()
    child.join()
    stops.close()
    assert not is_watching


def test_a_signal_outside_the_loop_stops_once_and_its_echo_is_taken_quietly(stops):
    with pytest.raises(StoppedError, match="stopped by SIGUSR1 outside of the training loop"):
        os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stops.requested == signal.SIGUSR1


def test_inside_the_loop_a_signal_is_a_number(stops):
    def loop() -> None:
        with stops.deferring():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stops.requested == signal.SIGUSR1

    with pytest.raises(StoppedError, match="after the last step"):
        loop()


def test_the_end_comes_whatever_reporting_it_raises(stops, monkeypatch):
    """A log on a full disk, say: the rank would keep its GPU."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(shutdown, "write_error_file", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    stops.requested = signal.SIGTERM
    with suppress(OSError):
        stops._end("a second signal came")
    assert ended == [128 + signal.SIGTERM]


def test_after_the_last_step_an_echo_is_taken_quietly_too(stops):
    def loop() -> None:
        with stops.deferring():
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(StoppedError):
        loop()
    os.kill(os.getpid(), signal.SIGUSR1)
