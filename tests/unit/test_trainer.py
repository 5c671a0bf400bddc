"""The loop: what it logs, and what it does about updates that are not finite. Its arithmetic: `test_reference_*`."""

import json
import math
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from distiller.checkpoint.format import steps_in
from distiller.checkpoint.reading import CheckpointReader
from distiller.checkpoint.saving import Checkpoints
from distiller.config.recipe import Checkpoint
from distiller.data import rng
from distiller.errors import AgreedError, RunError, StoppedError
from distiller.student_state.moving_average import MovingAverage
from distiller.student_state.plain import PlainState
from distiller.tasks.base import LossSum
from distiller.training.buffer_rollback import BufferRollback
from distiller.training.loop import train
from distiller.training.nonfinite_guard import NonFiniteGuard
from distiller.training.tracking import _peak_of
from tests.toy_network import setup
from tests.toy_state import IDENTITY
from tests.toy_task import DIM, LinearTeacher, Sequences, TokenTask, ToyStudent, build_toy_run, toy_recipe

RANKS = setup().ranks


def test_only_logged_steps_are_written_and_the_first_and_last_are(tmp_path):
    train(build_toy_run(toy_recipe(tmp_path, batch_size=8, log_every=3)))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 3, 6, 8]


def test_the_teacher_is_asked_once_an_update(tmp_path):
    run = build_toy_run(toy_recipe(tmp_path, batch_size=2), accumulation_steps=4)
    train(run)
    assert run.teacher.num_calls == 8


def test_a_teacher_that_overflows_is_named(tmp_path):
    run = build_toy_run(toy_recipe(tmp_path, batch_size=8))
    run.teacher.weight = torch.full((DIM, DIM), float("inf"))
    with pytest.raises(RunError, match="teacher's output is not finite"):
        train(run)


class SpoiltTask(TokenTask):
    """The loss of some samples is not finite; of the others it is TokenTask's."""

    def __init__(self, spoilt: set[int], value: float) -> None:
        self._spoilt, self._value = spoilt, value

    def loss(self, student_outputs, teacher_outputs, batch):
        loss = super().loss(student_outputs, teacher_outputs, batch)
        if self._spoilt.isdisjoint(self.sample_ids(batch)):
            return loss
        # The gradient of this term is finite: the loss alone is not.
        return LossSum(loss.total + self._value, loss.terms)


def bad_batches(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "bad_batches.jsonl").read_text().splitlines()]


def flat(run) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in run.student.parameters()])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("fused", [True, False])
def test_a_bad_update_leaves_student_moments_and_average_as_they_were(tmp_path, value, fused):
    """Sample 5 comes once an epoch of two updates: four updates of eight are left out, never two in a row."""
    run = build_toy_run(toy_recipe(tmp_path, batch_size=8, fused=fused), task=SpoiltTask({5}, value))
    state = PlainState(run.accelerator, run.student, run.optimizer)
    run.average = MovingAverage(state, 0.9)
    run.recipe = run.recipe.model_copy(update={"checkpoint": Checkpoint(every_steps=1, keep=8)})
    run.checkpoints = Checkpoints(tmp_path, run.ranks, 8, IDENTITY, state, run.average)
    train(run)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    bad_steps = [line["step"] for line in lines if line["loss"] is None]
    assert len(bad_steps) == 4
    assert lines[-1]["optim/skipped_steps"] == 4
    assert [row["step"] for row in bad_batches(tmp_path)] == bad_steps
    assert all(5 in row["sample_ids"] and len(row["sample_ids"]) == 8 for row in bad_batches(tmp_path))
    assert [row["loss"] for row in bad_batches(tmp_path)] == [str(value)] * 4
    good_steps = [step for step in range(1, 9) if step not in bad_steps]
    folders = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert [folder.name for folder in folders] == [f"step-{step}" for step in good_steps]
    assert torch.isfinite(flat(run)).all()
    assert all(torch.isfinite(piece.values).all() for piece in run.average.pieces())


def test_without_its_bad_updates_a_run_is_that_of_the_good_ones(tmp_path):
    """By hand: the same updates, with the bad ones' steps left out."""
    run = build_toy_run(toy_recipe(tmp_path, batch_size=8), task=SpoiltTask({5}, float("nan")))
    run.average = MovingAverage(PlainState(run.accelerator, run.student, run.optimizer), 0.9)
    train(run)
    student, teacher, data = TokenTask().build_student(), LinearTeacher(), Sequences()
    matrices = [{"params": [student.model.weight]}, {"params": [student.model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(matrices, weight_decay=0.01, fused=True)
    average = [p.detach().clone() for p in student.parameters()]
    for step in range(8):
        epoch, place = divmod(step * 8, 16)
        order = rng.sample_order(0, epoch, 16)[place : place + 8]
        if 5 in order:
            continue
        tokens = torch.cat([data[epoch, sample_id][1] for sample_id in order])
        optimizer.zero_grad()
        (student(tokens) - tokens @ teacher.weight).square().mean(1).mean().backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - step / 8)
        optimizer.step()
        for mean, value in zip(average, student.parameters(), strict=True):
            mean.lerp_(value.detach(), 0.1)
    wanted = torch.cat([p.detach().flatten() for p in student.parameters()])
    assert ((flat(run) - wanted).norm() / wanted.norm()).item() < 1e-6
    means = torch.cat([piece.values for piece in run.average.pieces()])
    wanted = torch.cat([mean.flatten() for mean in average])
    assert ((means - wanted).norm() / wanted.norm()).item() < 1e-6
    steps = {int(state["step"]) for state in run.optimizer.state.values()}
    assert steps == {4}


class NormTask(SpoiltTask):
    """With BatchNorm before the layer; the vectors of the spoilt samples are infinite, or their loss is."""

    def __init__(self, spoilt: set[int], is_in_data: bool) -> None:
        super().__init__(spoilt, 0.0 if is_in_data else math.inf)
        self._is_in_data = is_in_data

    def build_student(self):
        linear = super().build_student().model
        return ToyStudent(torch.nn.Sequential(torch.nn.BatchNorm1d(DIM), linear))

    def student_inputs(self, batch, teacher_outputs, dtype):
        inputs = super().student_inputs(batch, teacher_outputs, dtype)
        is_spoilt = self._is_in_data and not self._spoilt.isdisjoint(self.sample_ids(batch))
        return {"input": inputs["input"] + math.inf} if is_spoilt else inputs


@pytest.mark.parametrize("is_in_data", [True, False])
@pytest.mark.parametrize(("batch_size", "accumulation_steps"), [(8, 1), (4, 2)])
def test_running_statistics_are_those_of_the_updates_taken(tmp_path, is_in_data, batch_size, accumulation_steps):
    """In the student, in its average and in the last checkpoint; by hand, over the good updates alone."""
    run = build_toy_run(toy_recipe(tmp_path, batch_size=batch_size), accumulation_steps, task=NormTask({5}, is_in_data))
    state = PlainState(run.accelerator, run.student, run.optimizer)
    run.average = MovingAverage(state, 0.9)
    run.checkpoints = Checkpoints(tmp_path, run.ranks, 8, IDENTITY, state, run.average)
    train(run)
    norm, data, means = torch.nn.BatchNorm1d(DIM), Sequences(), [torch.zeros(DIM), torch.ones(DIM)]
    for step in range(8):
        epoch, place = divmod(step * 8, 16)
        order = rng.sample_order(0, epoch, 16)[place : place + 8]
        if 5 not in order:
            for part in range(accumulation_steps):
                ids = order[part * batch_size :][:batch_size]
                norm(torch.cat([data[epoch, sample_id][1] for sample_id in ids]))
            for mean, value in zip(means, (norm.running_mean, norm.running_var), strict=True):
                mean.lerp_(value, 0.1)
    ours = run.student.model[0]
    assert torch.allclose(ours.running_mean, norm.running_mean)
    assert torch.allclose(ours.running_var, norm.running_var)
    assert ours.num_batches_tracked == norm.num_batches_tracked == 4 * accumulation_steps
    average = {piece.name: piece.values for piece in run.average.pieces()}
    assert torch.allclose(average["model.0.running_mean"], means[0], atol=1e-6)
    assert torch.allclose(average["model.0.running_var"], means[1], atol=1e-6)
    saved = dict(CheckpointReader(tmp_path / "checkpoints" / "step-8").whole("weights"))
    assert torch.equal(saved["model.0.running_var"], ours.running_var)
    assert all(torch.isfinite(value).all() for value in saved.values())


def test_only_persistent_buffers_are_restored():
    """A submodule's buffer that is not persistent keeps its new value, beside a persistent one of the same name."""
    student = torch.nn.Sequential(torch.nn.Module(), torch.nn.Module())
    student[0].register_buffer("mean", torch.zeros(2))
    student[1].register_buffer("mean", torch.zeros(2), persistent=False)
    rollback = BufferRollback(student)
    for buffer in student.buffers():
        buffer.fill_(1.0)
    rollback.keep_or_restore(torch.ones(()))
    assert [buffer.tolist() for buffer in student.buffers()] == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize("log_every", [1, 100])
def test_too_many_bad_updates_in_a_row_end_the_run_before_another_one(tmp_path, log_every):
    run = build_toy_run(toy_recipe(tmp_path, batch_size=8, log_every=log_every, max_bad_steps=3))
    with torch.no_grad():
        run.student.model.weight.fill_(float("nan"))
    with pytest.raises(AgreedError, match=r"3 updates in a row, up to step 3, had a loss or gradient that is not"):
        train(run)
    assert [row["step"] for row in bad_batches(tmp_path)] == [1, 2, 3]
    assert not (tmp_path / "checkpoints").exists()


def test_the_first_bad_update_can_be_the_last(tmp_path):
    run = build_toy_run(toy_recipe(tmp_path, batch_size=8, max_bad_steps=1), task=SpoiltTask(set(range(16)), math.inf))
    before = flat(run)
    with pytest.raises(AgreedError) as error:
        train(run)
    assert "step 1 had a loss" in str(error.value)
    assert f"samples are {', '.join(map(str, rng.sample_order(0, 0, 16)[:8]))}, {tmp_path}" in str(error.value)
    assert torch.equal(flat(run), before)


def test_a_stop_after_a_bad_update_keeps_what_was_trained(tmp_path):
    stops = cast(Any, SimpleNamespace(requested=0))

    class Stopping(SpoiltTask):
        def loss(self, student_outputs, teacher_outputs, batch):
            stops.requested = 0 if self._spoilt.isdisjoint(self.sample_ids(batch)) else signal.SIGTERM
            return super().loss(student_outputs, teacher_outputs, batch)

    in_second = rng.sample_order(0, 0, 16)[8]
    run = build_toy_run(toy_recipe(tmp_path, batch_size=8), task=Stopping({in_second}, math.nan))
    with pytest.raises(StoppedError, match="at step 2, which was left out; continue"):
        train(run, stops)
    held = flat(run)
    with torch.no_grad():
        run.student.model.weight.zero_()
    assert run.checkpoints.load(2) == 1
    assert torch.equal(flat(run), held)
    assert {int(state["step"]) for state in run.optimizer.state.values()} == {1}


@pytest.mark.parametrize(
    ("settings", "saved"),
    [
        ({"every_minutes": 1e-9}, list(range(1, 9))),
        ({}, [8]),
        ({"every_minutes": None}, [8]),
        ({"every_steps": 5}, [5, 8]),
    ],
)
def test_saves_by_the_clock_need_no_logged_step(tmp_path, settings, saved):
    run = build_toy_run(toy_recipe(tmp_path, batch_size=8, log_every=100))
    run.recipe = run.recipe.model_copy(update={"checkpoint": Checkpoint(**settings)})
    state = PlainState(run.accelerator, run.student, run.optimizer)
    run.checkpoints = Checkpoints(tmp_path, run.ranks, 8, IDENTITY, state, None)
    train(run)
    assert steps_in(tmp_path / "checkpoints") == saved


def test_a_save_that_is_due_at_a_bad_update_is_made_after_the_next_good_one(tmp_path):
    in_second = rng.sample_order(0, 0, 16)[8]
    run = build_toy_run(toy_recipe(tmp_path, batch_size=8, log_every=100), task=SpoiltTask({in_second}, math.nan))
    settings = Checkpoint(every_steps=2, keep=8, at_end=False)
    run.recipe = run.recipe.model_copy(update={"checkpoint": settings})
    state = PlainState(run.accelerator, run.student, run.optimizer)
    run.checkpoints = Checkpoints(tmp_path, run.ranks, 8, IDENTITY, state, None)
    train(run)
    epochs = [rng.sample_order(0, epoch, 16) for epoch in range(4)]
    is_bad = [in_second in epochs[step // 2][step % 2 * 8 :][:8] for step in range(8)]
    assert is_bad[1]
    wanted = {next(later for later in range(due, 9) if not is_bad[later - 1]) for due in (2, 4, 6)}
    assert steps_in(tmp_path / "checkpoints") == sorted(wanted)


def test_the_last_checkpoint_is_written_also_after_a_bad_update(tmp_path):
    """Its state is that of the last good update; a longer run can continue it."""
    in_last = rng.sample_order(0, 3, 16)[8]
    run = build_toy_run(toy_recipe(tmp_path, batch_size=8), task=SpoiltTask({in_last}, math.nan))
    state = PlainState(run.accelerator, run.student, run.optimizer)
    run.checkpoints = Checkpoints(tmp_path, run.ranks, 8, IDENTITY, state, None)
    outcome = train(run)
    assert bad_batches(tmp_path)[-1]["step"] == run.last_step == 8
    assert steps_in(tmp_path / "checkpoints") == [8]
    assert run.checkpoints.load(8) == outcome.metrics["optim/skipped_steps"]


def test_bad_updates_that_are_trained_again_are_listed_once(tmp_path):
    lines = [{"step": step, "rank": 0, "loss": "nan", "sample_ids": [1]} for step in (2, 3, 4)]
    (tmp_path / "bad_batches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = build_toy_run(toy_recipe(tmp_path, batch_size=8))
    run.first_step = 4
    train(run)
    assert [line["step"] for line in bad_batches(tmp_path)] == [2, 3]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA B200", None),
    ],
)
def test_a_gpu_s_peak_is_found_by_whole_words(name, peak):
    assert _peak_of(name) == peak


@pytest.mark.parametrize(
    ("precision", "loss", "is_skipped", "was_bad"),
    [
        # Overflowing gradients are normal in fp16, where the scaler skips the step and lowers its scale.
        ("fp16", 1.0, 1.0, 0.0),
        ("fp16", math.inf, 1.0, 1.0),
        ("bf16", 1.0, 1.0, 1.0),
        ("no", 1.0, 1.0, 1.0),
        ("no", 1.0, 0.0, 0.0),
    ],
)
def test_in_fp16_the_loss_alone_makes_an_update_bad(tmp_path, precision, loss, is_skipped, was_bad):
    accelerator = cast(Any, SimpleNamespace(mixed_precision=precision, device=torch.device("cpu")))
    guard = NonFiniteGuard(accelerator, RANKS, tmp_path, max_bad_steps=5, skipped=0, first_step=1)
    guard.record(1, [3], [torch.tensor(loss), torch.tensor(2.0)], torch.tensor(is_skipped))
    assert float(guard.was_bad) == was_bad
    assert float(guard.num_skipped) == is_skipped
