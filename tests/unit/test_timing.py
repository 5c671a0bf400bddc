"""The timer of a step's parts reads events of a GPU only once they are complete."""

from __future__ import annotations

import pytest
import torch

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
