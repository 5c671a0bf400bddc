"""The timer of a step's parts reads events of a GPU only once they are complete."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from distiller.training import timing
from distiller.training.timing import StepTimer


class Event:
    """As `torch.cuda.Event` on a stream that has completed nothing until the host waits for it. One second apart."""

    recorded = 0
    completed = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.number = 0

    def record(self) -> None:
        Event.recorded += 1
        self.number = Event.recorded

    def synchronize(self) -> None:
        Event.completed = max(Event.completed, self.number)

    def query(self) -> bool:
        return self.number <= Event.completed

    def elapsed_time(self, end: Event) -> float:
        if end.number > Event.completed:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1000.0 * (end.number - self.number)


def test_on_a_gpu_the_timer_waits_for_its_events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = StepTimer(torch.device("cuda"))
    for _ in range(2):
        for name in ("data", "teacher", "student", "optimizer"):
            with timer.part(name):
                pass
        timer.end_step()
    report = timer.read()
    assert [report[name] for name in ("teacher", "student", "optimizer")] == [1000.0, 1000.0, 1000.0]
    assert report["data"] == pytest.approx(0, abs=1)


def test_a_teacher_that_is_asked_ahead_counts_once_it_has_answered(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = StepTimer(torch.device("cuda"))
    with timer.part("student"):
        pass
    with timer.measured("teacher"):
        pass
    assert timer.current_part is None
    timer.end_step()
    first = timer.read()
    assert (first["student"], first["teacher"]) == (1000.0, 0.0)
    timer.restart()
    with timer.part("student"):
        pass
    timer.end_step()
    second = timer.read()
    assert (second["student"], second["teacher"]) == (1000.0, 1000.0)
    assert timer.read()["teacher"] == 0.0


def test_the_part_that_failed_is_known():
    timer = StepTimer(torch.device("cpu"))
    with timer.part("data"):
        assert timer.current_part == "data"
    with pytest.raises(ValueError, match="broken"), timer.part("teacher"):
        raise ValueError("broken")
    assert timer.current_part == "teacher"


def test_discarded_steps_are_in_no_window():
    timer = StepTimer(torch.device("cpu"))
    with timer.part("teacher"):
        sum(range(1000))
    timer.end_step()
    timer.discard()
    with timer.part("student"):
        sum(range(1000))
    timer.end_step()
    times = timer.read()
    assert times["teacher"] == 0
    assert 0 < times["student"] <= times["step"]
    assert timer.timed()[0] == 1


def test_discarded_events_of_a_gpu_are_in_no_window(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = StepTimer(torch.device("cuda"))
    for _ in range(2):
        with timer.part("student"):
            pass
        timer.discard()
    with timer.part("student"):
        pass
    timer.end_step()
    assert timer.read()["student"] == 1000.0


def test_on_a_cpu_parts_are_milliseconds_of_the_clock(monkeypatch):
    """Two steps, each of a quarter of a second of data, half a second of the student and as much between the parts."""
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    timer = StepTimer(torch.device("cpu"))

    def run_steps(count: int) -> None:
        for _ in range(count):
            for name, seconds in (("data", 0.25), ("student", 0.5)):
                with timer.part(name):
                    now[0] += seconds
            now[0] += 0.5
            timer.end_step()

    run_steps(2)
    assert timer.read() == {"step": 1250.0, "data": 250.0, "teacher": 0.0, "student": 500.0, "optimizer": 0.0}
    assert timer.timed() == (2, 2.5)
    # Time until `restart` is in no window, and neither is one that is not to be counted.
    now[0] += 100.0
    timer.restart()
    run_steps(1)
    assert timer.read(counts=False)["step"] == 1250.0
    timer.restart()
    run_steps(3)
    assert timer.read()["student"] == 500.0
    # Of several windows the first is left out.
    assert timer.timed() == (3, 3.75)
