"""Code that is made again in the middle of a run is said, with the reason."""

from __future__ import annotations

import pytest
import torch

from distiller.distributed.ranks import Ranks
from distiller.training.loop import train
from distiller.training.recompilations import MAX_LINES, RecompilationNotice
from tests.toy_task import TokenTask, build_toy_run, toy_recipe

FIRST_STEP = 5


@pytest.fixture
def doubled():
    torch._dynamo.reset()
    # Each size has its own code, and the backend runs it as it is.
    yield torch.compile(lambda x: 2 * x, dynamic=False, backend="eager")
    torch._dynamo.reset()


@pytest.fixture
def said(doubled, capfd):
    """What is said when the n-th update since the first computes with the n-th size."""

    def after(*sizes: int) -> list[str]:
        notice = RecompilationNotice(Ranks.join(torch.device("cpu")), FIRST_STEP)
        for number, size in enumerate(sizes):
            doubled(torch.ones(size))
            notice.end(FIRST_STEP + number)
        return capfd.readouterr().err.splitlines()

    return after


def test_the_update_the_function_and_the_reason_are_named(said):
    [line] = said(3, 3, 3, 4, 4)
    assert line.startswith(f"warning: update {FIRST_STEP + 3} compiled <lambda> (test_recompilations.py:")
    assert ") again, for 0." in line or ") again, for 1." in line
    assert "size mismatch at index 0. expected 3, actual 4" in line


def test_the_first_two_updates_may_compile(said):
    assert said(3, 4, 4, 3) == []


def test_many_are_silent_after_a_few_lines(said):
    lines = said(2, 2, *range(3, 12))
    assert len(lines) == MAX_LINES
    assert [line.endswith("more of these are not shown") for line in lines] == [False] * (MAX_LINES - 1) + [True]


def test_a_run_says_so(tmp_path, capfd, doubled):
    class GrowingTask(TokenTask):
        num_losses = 0

        def loss(self, student_outputs, teacher_outputs, batch):
            self.num_losses += 1
            doubled(torch.ones(2 if self.num_losses < 4 else 3))
            return super().loss(student_outputs, teacher_outputs, batch)

    train(build_toy_run(toy_recipe(tmp_path, batch_size=4, max_steps=5), task=GrowingTask()))
    [line] = [line for line in capfd.readouterr().err.splitlines() if "compiled" in line]
    assert line.startswith("warning: update 4 compiled ")
