"""A teacher that is asked ahead on a stream of its own: losses and students are those without, bit for bit."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from distiller.training.loop import train
from tests import toys
from tests.distributed.test_prefetching import ALONE, TOGETHER, assert_same, runs_of_all_cases
from tests.gpu.ranks import NUM_GPUS
from tests.toy_task import LinearTeacher, TokenTask, build_toy_run, toy_recipe

pytestmark = [pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU"), pytest.mark.timeout(500)]
WORLDS = [count for count in (1, 2) if count <= NUM_GPUS]
LATE_CYCLES = 400_000_000
"""Of a GPU's clock: about 0.2 s."""
HOST_S = 0.1
"""Less than that, and more than the host takes for a toy's update."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return runs_of_all_cases(tmp_path_factory.mktemp, on_gpu=True)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    ("case", "world_size"),
    [(case, count) for count in WORLDS for case in (ALONE if count == 1 else TOGETHER)],
    ids=str,
)
def test_runs_are_the_same(trained, case, world_size, depth):
    assert_same(trained, case, world_size, depth)


def late(value: Tensor) -> Tensor:
    """The value, which the current stream puts where NaN stands before, and not soon."""
    result = torch.full_like(value, float("nan"))
    torch.cuda._sleep(LATE_CYCLES)
    return result.copy_(value)


class LateInputs(TokenTask):
    """The student's stream is late with what the teacher is asked."""

    def to_device(self, batch, device):
        # Page-locked, so that the host never waits for the copies.
        moved = [(i, tokens.pin_memory().to(device, non_blocking=True)) for i, tokens in batch]
        return [(i, late(tokens)) for i, tokens in moved]


class LateStudent(TokenTask):
    """The student's stream is late to read the answers; the host goes on at once, and drops them."""

    def to_device(self, batch, device):
        return [(i, tokens.pin_memory().to(device, non_blocking=True)) for i, tokens in batch]

    def loss(self, student_outputs, teacher_outputs, batch):
        torch.cuda._sleep(LATE_CYCLES)
        return super().loss(student_outputs, teacher_outputs, batch)


class GpuTeacher(LinearTeacher):
    def __init__(self) -> None:
        super().__init__()
        self.weight = self.weight.cuda()


class LateTeacher(GpuTeacher):
    """Its own stream is late with the answers."""

    def predict(self, requests):
        return [{"output": late(outputs["output"])} for outputs in super().predict(requests)]


class OverwritingTeacher(GpuTeacher):
    """While the student's stream is late, it puts NaN into all memory that the allocator has for answers."""

    def predict(self, requests):
        time.sleep(HOST_S)
        answers = super().predict(requests)
        used = [torch.full_like(outputs["output"], float("nan")) for outputs in answers for _ in range(9)]
        del used
        return answers


def result_of(
    folder: Path, depth: int, task: TokenTask, teacher: GpuTeacher, placement: str
) -> tuple[list, np.ndarray]:
    """Losses and the student."""
    # Logged once: a logged update's loss is read, for which the host waits.
    recipe = toy_recipe(folder, batch_size=8, max_steps=6, log_every=6)
    asked = recipe.teacher.model_copy(update={"prefetch_steps": depth})
    run = build_toy_run(recipe.model_copy(update={"teacher": asked}), task=task, teacher=teacher, cpu=False)
    run.placement = placement
    train(run)
    weights = torch.cat([p.detach().flatten() for p in run.student.parameters()]).cpu().numpy()
    return [line["loss"] for line in toys.read_metrics(folder)], weights


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    ("task", "teacher", "placement"),
    [
        (LateInputs, GpuTeacher, "replicated"),
        (LateInputs, GpuTeacher, "cpu"),
        (TokenTask, LateTeacher, "replicated"),
        (TokenTask, LateTeacher, "cpu"),
        # `cpu` is asked by a thread of its own, which allocates while the student computes.
        (LateStudent, OverwritingTeacher, "cpu"),
    ],
)
def test_each_stream_waits_for_the_other_however_late_it_is(tmp_path, task, teacher, placement, depth):
    losses, student = result_of(tmp_path / "ahead", depth, task(), teacher(), placement)
    expected_losses, expected = result_of(tmp_path / "reference", 0, TokenTask(), GpuTeacher(), "replicated")
    assert losses == expected_losses
    assert np.array_equal(student, expected)
