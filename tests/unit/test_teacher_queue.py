"""A teacher that is asked ahead: the order of questions and passes, threads, stops, failures and refusals."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch

from distiller import commands
from distiller.config.loading import parse
from distiller.errors import AgreedError, RunError, StoppedError, UserError
from distiller.training.loop import train
from tests import toys
from tests.toy_task import LinearTeacher, TokenTask, build_toy_run, toy_recipe

NUM_UPDATES = 4


def recipe_ahead(folder, prefetch_steps: int, **train: Any):
    recipe = toy_recipe(folder, batch_size=4, max_steps=NUM_UPDATES, **train)
    return recipe.model_copy(update={"teacher": recipe.teacher.model_copy(update={"prefetch_steps": prefetch_steps})})


class Log(list):
    """What teacher and student did, in order: ("asked" or "trained", the update's sample ids)."""


class LoggedTeacher(LinearTeacher):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log, self.threads = log, []

    def predict(self, requests):
        self.log.append(("asked", tuple(i for request in requests for i in request.sample_ids)))
        self.threads.append(threading.current_thread().name.partition("_")[0])
        return super().predict(requests)


class LoggedTask(TokenTask):
    def __init__(self, log: Log) -> None:
        self.log = log

    def loss(self, student_outputs, teacher_outputs, batch):
        self.log.append(("trained", self.sample_ids(batch)))
        return super().loss(student_outputs, teacher_outputs, batch)


def logged(folder, prefetch_steps: int, placement: str = "replicated") -> LoggedTeacher:
    log = Log()
    teacher = LoggedTeacher(log)
    run = build_toy_run(recipe_ahead(folder, prefetch_steps), task=LoggedTask(log), teacher=teacher)
    run.placement = placement
    train(run)
    return teacher


@pytest.mark.parametrize(
    ("prefetch_steps", "order"),
    [
        (0, "0a 0t 1a 1t 2a 2t 3a 3t"),
        (1, "0a 1a 0t 2a 1t 3a 2t 3t"),
        (2, "0a 1a 2a 0t 3a 1t 2t 3t"),
        (9, "0a 1a 2a 3a 0t 1t 2t 3t"),
    ],
)
def test_an_update_is_asked_so_many_updates_ahead(tmp_path, prefetch_steps, order):
    log = logged(tmp_path, prefetch_steps).log
    updates = [ids for what, ids in log if what == "trained"]
    assert len(set(updates)) == NUM_UPDATES
    assert " ".join(f"{updates.index(ids)}{what[0]}" for what, ids in log) == order


def test_metrics_say_what_is_held(tmp_path):
    logged(tmp_path / "ahead", 2)
    held = [line["memory/prefetched_gib"] for line in toys.read_metrics(tmp_path / "ahead")]
    # Inputs and outputs of two updates, of two others, of one, and of none.
    assert min(held[:2]) > held[2] > held[3] == 0
    logged(tmp_path / "alone", 0)
    assert {line["memory/prefetched_gib"] for line in toys.read_metrics(tmp_path / "alone")} == {None}


def test_a_teacher_on_the_host_is_asked_in_a_thread_once_the_student_was_trained(tmp_path):
    assert logged(tmp_path, 1, "cpu").threads == ["MainThread", "MainThread", "teacher", "teacher"]
    assert set(logged(tmp_path, 0, "cpu").threads) == {"MainThread"}


@pytest.mark.timeout(60)
def test_both_compute_at_the_same_time(tmp_path):
    """The third answer waits for the student's second pass, which waits until that answer is under way."""
    trained, answering = threading.Event(), threading.Event()

    class WaitingTeacher(LinearTeacher):
        def predict(self, requests):
            if self.num_calls == 2:
                answering.set()
                assert trained.wait(30)
            return super().predict(requests)

    class WaitingTask(TokenTask):
        num_passes = 0

        def loss(self, student_outputs, teacher_outputs, batch):
            self.num_passes += 1
            if self.num_passes == 2:
                assert answering.wait(30)
                trained.set()
            return super().loss(student_outputs, teacher_outputs, batch)

    run = build_toy_run(recipe_ahead(tmp_path, 1), task=WaitingTask(), teacher=WaitingTeacher())
    run.placement = "disk"
    train(run)


@pytest.mark.timeout(60)
def test_updates_that_the_teacher_can_answer_at_the_same_time_are_asked_so(tmp_path):
    """With two updates ahead, the answers to the fourth and the fifth wait for each other."""

    class ParallelTeacher(LinearTeacher):
        num_parallel_updates = 2
        both = threading.Barrier(2)
        threads: ClassVar[set[str]] = set()

        def predict(self, requests):
            with lock:
                self.num_calls += 1
                is_met = self.num_calls in (4, 5)
            if is_met:
                self.threads.add(threading.current_thread().name)
                self.both.wait(30)
            return [{"output": request.inputs["tokens"] @ self.weight} for request in requests]

    lock, losses = threading.Lock(), []
    for folder, depth, teacher in (("ahead", 2, ParallelTeacher()), ("alone", 0, LinearTeacher())):
        recipe = recipe_ahead(tmp_path / folder, depth)
        longer = recipe.train.model_copy(update={"max_steps": 7})
        run = build_toy_run(recipe.model_copy(update={"train": longer}), teacher=teacher)
        run.placement = "dedicated"
        train(run)
        losses.append([line["loss"] for line in toys.read_metrics(tmp_path / folder)])
    assert len(ParallelTeacher.threads) == 2
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("placement", "sizes_vary", "others"),
    [
        ("cpu", True, "MainThread"),
        ("cpu", False, "teacher"),
        # Its network runs in other processes, where nobody compiles for the student.
        ("dedicated", True, "teacher"),
    ],
)
def test_no_thread_answers_where_blocks_may_be_compiled_meanwhile(tmp_path, placement, sizes_vary, others):
    log = Log()
    task, teacher = LoggedTask(log), LoggedTeacher(log)
    cast(Any, task).network = SimpleNamespace(sizes_vary=sizes_vary)
    run = build_toy_run(recipe_ahead(tmp_path, 1), task=task, teacher=teacher)
    run.placement, run.compiles_blocks = placement, True
    train(run)
    assert teacher.threads == ["MainThread", "MainThread", others, others]


@pytest.mark.parametrize("placement", ["replicated", "cpu"])
def test_a_failure_of_the_teacher_ends_the_run_at_its_update(tmp_path, placement):
    class Failing(LinearTeacher):
        def predict(self, requests):
            if self.num_calls == 3:
                raise RunError("no answer")
            return super().predict(requests)

    run = build_toy_run(recipe_ahead(tmp_path, 1), teacher=Failing())
    run.placement = placement
    with pytest.raises(RunError, match="no answer"):
        train(run)
    # A thread's failure is that of the update which needs the answer.
    assert len(toys.read_metrics(tmp_path)) == (3 if placement == "cpu" else 2)
    for thread in threading.enumerate():
        if thread.name.startswith("teacher"):
            thread.join(20)
            assert not thread.is_alive()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("error", "answer_s"), [(StoppedError, 0.3), (RunError, 20.0)])
def test_a_stop_waits_for_the_answer_under_way_and_a_failure_does_not(tmp_path, error, answer_s):
    """After a failure another rank may be gone, for which the answer waits.

    With two updates ahead, the fourth answer is under way in the fourth update, and the fifth is next.
    """
    begun, over = threading.Event(), threading.Event()

    class SlowTeacher(LinearTeacher):
        num_answered = 0

        def predict(self, requests):
            answers = super().predict(requests)
            if self.num_calls == 4:
                begun.set()
                over.wait(answer_s)
            self.num_answered += 1
            return answers

    class Ends:
        """In the fourth update, whose answer is under way."""

        looks = 0

        @property
        def requested(self) -> int:
            self.looks += 1
            if self.looks < 4:
                return 0
            assert begun.wait(30)
            if error is RunError:
                raise RunError("broken")
            return signal.SIGTERM

    recipe, teacher = recipe_ahead(tmp_path, 2), SlowTeacher()
    longer = recipe.train.model_copy(update={"max_steps": 7})
    run = build_toy_run(recipe.model_copy(update={"train": longer}), teacher=teacher)
    run.placement = "cpu"
    with pytest.raises(error):
        train(run, cast(Any, Ends()))
    answered_by_then = teacher.num_answered
    over.set()
    for thread in threading.enumerate():
        if thread.name.startswith("teacher"):
            thread.join(20)
    if error is StoppedError:
        assert answered_by_then >= 4
    else:
        assert answered_by_then == 3
        # The fourth ends, and the fifth is never asked for.
        assert teacher.num_calls == teacher.num_answered == 4


@pytest.mark.parametrize("placement", ["replicated", "cpu"])
def test_a_run_that_is_stopped_with_answers_in_flight_goes_on_bit_for_bit(tmp_path, pipelines, placement):
    def recipe_of(name: str, prefetch_steps: int, **sections: Any):
        options = {"placement": placement, "prefetch_steps": prefetch_steps}
        sections |= {"train": {"max_steps": 5, "batch_size": 4, "log_every": 1}}
        data = toys.recipe(tmp_path, pipelines[1], **sections)
        return parse({**data, "output_dir": str(tmp_path / name), "teacher": {**data["teacher"], **options}})

    commands.train(recipe_of("whole", 0), resume=False)

    class Stops:
        """Asks for a stop once the loop has looked three times."""

        looks = 0

        @property
        def requested(self) -> int:
            self.looks += 1
            return signal.SIGTERM if self.looks > 3 else 0

        def deferring(self):
            from contextlib import nullcontext

            return nullcontext()

    with pytest.raises(StoppedError, match="at step 3"):
        commands.train(recipe_of("broken", 2), resume=False, stops=cast(Any, Stops()))
    commands.train(recipe_of("broken", 1), resume=True)
    toys.assert_same_run(tmp_path / "broken", tmp_path / "whole", loss_tolerance=0.0, tolerance=0.0)


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        ({"placement": "swap"}, "placement swap: its weights leave the GPU so that the student can train; set it to 0"),
        ({"placement": "cached", "cache": "outputs"}, "placement cached: no teacher runs, and the loader reads ahead"),
    ],
)
def test_placements_that_cannot_be_asked_ahead_are_refused(tmp_path, pipelines, teacher, words):
    data = toys.recipe(tmp_path, pipelines[1])
    recipe = parse({**data, "teacher": {**data["teacher"], **teacher, "prefetch_steps": 2}})
    with pytest.raises(UserError, match=words):
        commands.check(recipe, None)


def test_a_run_that_asks_no_teacher_has_nobody_to_ask_ahead(tmp_path, pipelines):
    data = toys.recipe(tmp_path, pipelines[1], task={"targets": "stored"})
    recipe = parse({**data, "teacher": {**data["teacher"], "prefetch_steps": 1}})
    with pytest.raises(UserError, match="prefetch_steps is 1 and this run asks no teacher while it trains"):
        commands.check(recipe, None)


def test_memory_that_runs_out_says_that_the_teacher_is_asked_ahead(tmp_path):
    class Full(LinearTeacher):
        def predict(self, requests):
            if self.num_calls == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super().predict(requests)

    run = build_toy_run(recipe_ahead(tmp_path, 1), teacher=Full())
    with pytest.raises(RunError, match=r"in update 2, teacher.*first: teacher\.prefetch_steps=0 \(0\.00 GiB, and"):
        train(run)


def test_a_failure_that_all_ranks_know_keeps_its_reason(tmp_path):
    """As where one rank computes for all, whose failure the others are told."""

    class Full(LinearTeacher):
        def predict(self, requests):
            reason = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            raise AgreedError("rank 0: OutOfMemoryError: CUDA out of memory.") from reason

    with pytest.raises(AgreedError, match=r"^out of GPU memory in update 1, teacher"):
        train(build_toy_run(recipe_ahead(tmp_path, 0), teacher=Full()))
