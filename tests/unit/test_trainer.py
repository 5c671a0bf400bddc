"""The loop's arithmetic against a plain loop, with token counts that differ from sample to sample."""

import json

import pytest
import torch

from distiller import draws
from distiller.errors import RunError
from distiller.trainer import train
from tests.toy_task import DIM, LinearTeacher, Sequences, TokenTask, build_toy_run, toy_recipe


def plain_loop(batch_size: int, steps: int) -> tuple[list[float], list[float], torch.Tensor]:
    """What the recipe means, written without accumulation, ranks or Accelerate."""
    student, teacher, data = TokenTask().build_student(), LinearTeacher(), Sequences()
    matrices = [{"params": [student.weight]}, {"params": [student.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(matrices, weight_decay=0.01)
    losses, norms = [], []
    for step in range(steps):
        epoch, place = divmod(step * batch_size, 16)
        order = draws.sample_order(0, epoch, 16)[place : place + batch_size]
        tokens = torch.cat([data[epoch, sample_id][1] for sample_id in order])
        loss = (student(tokens) - tokens @ teacher.weight).square().mean(1).mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(student.parameters(), 0.5).item())
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - step / steps)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, torch.cat([p.detach().flatten() for p in student.parameters()])


@pytest.mark.parametrize(("batch_size", "accumulation_steps"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_accumulation_is_exact_when_counts_differ(tmp_path, batch_size, accumulation_steps):
    run = build_toy_run(toy_recipe(tmp_path, batch_size=batch_size), accumulation_steps)
    train(run)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses, norms, weights = plain_loop(8, 8)
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-5)
    assert [line["grad_norm"] for line in lines] == pytest.approx(norms, rel=1e-5)
    ours = torch.cat([p.detach().flatten() for p in run.student.parameters()])
    assert ((ours - weights).norm() / weights.norm()).item() < 1e-6
    assert run.teacher.num_calls == 8
    assert lines[-1]["samples"] == 64


def test_only_logged_steps_are_written_and_the_first_and_last_are(tmp_path):
    train(build_toy_run(toy_recipe(tmp_path, batch_size=8, log_every=3)))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 3, 6, 8]


def test_a_teacher_that_overflows_is_named(tmp_path):
    run = build_toy_run(toy_recipe(tmp_path, batch_size=8))
    run.teacher.weight = torch.full((DIM, DIM), float("inf"))
    with pytest.raises(RunError, match="teacher's output is not finite"):
        train(run)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    run = build_toy_run(toy_recipe(tmp_path, batch_size=8))
    with torch.no_grad():
        run.student.weight.fill_(float("nan"))
    with pytest.raises(RunError, match="a loss or gradient up to step 1 is not finite"):
        train(run)
