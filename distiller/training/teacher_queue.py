"""Asks the teacher for coming updates while the student trains, as far ahead as `teacher.prefetch_steps` says."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, final

import torch

from distiller.config.placements import PLACEMENTS
from distiller.data.loading import batches_of
from distiller.tasks.micro_batch import MicroBatch
from distiller.teachers.base import Outputs, Request
from distiller.training.run import Run
from distiller.training.timing import StepTimer

Targets = list[Outputs] | list[None]
"""The teacher's outputs for each micro-batch of an update; None for each without a teacher."""


@final
@dataclass
class Update:
    """An update's micro-batches on the device, and what the teacher says to them.

    Attributes:
        answers: None until they are asked for; then the outputs, or what will be them.
        ready: recorded behind the answers on the stream where they are computed; None on a CPU and without prefetching.
        num_bytes: of inputs and outputs, once they are answered.
    """

    micro_batches: list[MicroBatch]
    answers: Targets | Future[Targets] | None = None
    ready: torch.cuda.Event | None = None
    num_bytes: int = 0
    batches: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.batches = [micro_batch.batch for micro_batch in self.micro_batches]


@final
class TeacherQueue:
    """The updates from the loader, in order, each with the teacher's answers.

    Without prefetching the teacher is asked for an update when the loop comes to it. With `teacher.prefetch_steps` k it
    is asked for update i + k before the student is trained on update i, so that both can compute at the same time.
    What it is asked does not depend on the student, so the answers are the same.

    On a GPU the teacher then has a stream of its own (one for each thread that asks it), of high priority, since it
    often waits (for copies, for other ranks) and the student's kernels fill the gaps. Before each question that stream
    waits for all that the student's was given until then, the micro-batches among it; and the student's waits for the
    answers of its update. Answers are allocated on the teacher's stream and read on the student's, so the allocator is
    told of the second one.

    Whoever communicates does so in one order on all ranks, since one thread starts all of it: the question for update
    i + k, then the student's passes of update i. A placement whose host waits while it answers (`cpu`, `disk`,
    `dedicated`) is asked by other threads, once the student has been trained for the first time: by one, or by as many
    as it can answer updates at the same time. Such placements exchange nothing between ranks after their first answer.
    And by then all blocks are compiled: while one thread compiles, transformers makes masks otherwise in all threads
    (`torch.compiler.is_compiling` is one for the process), and with them other kernels run. Where sizes vary,
    compilation may go on at any time, so no thread that runs the network is started then.
    """

    def __init__(self, run: Run, timer: StepTimer) -> None:
        """Does not ask yet."""
        self._run, self._timer, self._device = run, timer, run.accelerator.device
        self._loader = batches_of(run.loader)
        self._num_left = run.last_step - run.first_step + 1
        self._depth = run.recipe.teacher.prefetch_steps
        self._streams: list[torch.cuda.Stream] = []
        self._of_thread = threading.local()
        self._make_stream()
        spec = PLACEMENTS.get(run.placement)
        self._uses_threads = False
        if self._depth and spec is not None and spec.prefetches_in_thread:
            compiles_here = run.compiles_blocks and not spec.computes_elsewhere
            self._uses_threads = not (compiles_here and run.task.network.sizes_vary)
        self._threads: ThreadPoolExecutor | None = None
        self._num_returned = 0
        self._updates: deque[Update] = deque()

    def load(self) -> Update:
        """The next update without its answers; with prefetching, as many after it are loaded as are asked ahead."""
        while self._num_left and len(self._updates) <= self._depth:
            with self._timer.part("data"):
                loaded: list[MicroBatch] = [next(self._loader) for _ in range(self._run.plan.accumulation_steps)]
            self._updates.append(Update([micro_batch.to(self._run.task, self._device) for micro_batch in loaded]))
            self._num_left -= 1
        return self._updates[0]

    def answers(self) -> Targets:
        """Asks for the updates that are loaded, and returns the answers for the one that `load` returned last.

        Communicates as the teacher's placement does.
        """
        for update in self._updates:
            if update.answers is None:
                self._ask(update)
        update = self._updates.popleft()
        self._num_returned += 1
        with self._timer.waiting_for("teacher"):
            answers = update.answers.result() if isinstance(update.answers, Future) else update.answers
        assert answers is not None
        if update.ready is not None:
            students = torch.cuda.current_stream(self._device)
            students.wait_event(update.ready)
            for tensor in (tensor for outputs in answers if outputs is not None for tensor in outputs.values()):
                tensor.record_stream(students)
        return answers

    def wait(self) -> None:
        """Waits for the answers that are under way, after which others may ask the teacher, on the student's stream.

        Communicates as the teacher's placement does.
        """
        for update in self._updates:
            if isinstance(update.answers, Future):
                update.answers.result()
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)

    @property
    def num_bytes(self) -> int:
        """Of inputs and outputs of the updates that were answered ahead, on this rank's device."""
        return sum(update.num_bytes for update in self._updates)

    def close(self) -> None:
        """Waits for what the teacher computes, whose answers are dropped."""
        self.abandon(waits=True)
        self._updates.clear()
        for stream in self._streams:
            stream.synchronize()

    def abandon(self, waits: bool = False) -> None:
        """Asks nothing more; without waiting, since another rank may be gone for which an answer waits."""
        if self._threads is not None:
            self._threads.shutdown(waits, cancel_futures=True)

    def _ask(self, update: Update) -> None:
        given = None
        if self._streams:
            given = torch.cuda.Event()
            given.record(torch.cuda.current_stream(self._device))
        if self._uses_threads and self._num_returned and self._run.teacher is not None:
            count = min(self._run.teacher.num_parallel_updates, self._depth)
            self._threads = self._threads or ThreadPoolExecutor(count, "teacher", self._make_stream)
            update.answers = self._threads.submit(self._predict_in_thread, update, given)
            return
        with self._on_stream(), self._timer.part("teacher"):
            update.answers = self._predict(update, given)

    def _predict_in_thread(self, update: Update, given: torch.cuda.Event | None) -> Targets:
        with self._on_stream(), self._timer.measured("teacher"):
            return self._predict(update, given)

    def _predict(self, update: Update, given: torch.cuda.Event | None) -> Targets:
        """On this thread's stream, which waits for what the student's was given until the update was asked for."""
        run, stream = self._run, self._stream
        if run.teacher is None:
            return [None] * len(update.micro_batches)
        if stream is not None and given is not None:
            # Not when the thread is given the update: the answer before it, under way then, must not wait.
            stream.wait_event(given)
        requests = [micro_batch.request(run.task) for micro_batch in update.micro_batches]
        answers = run.teacher.predict(requests)
        if self._depth:
            update.num_bytes = _num_bytes(requests, answers)
        if stream is not None:
            update.ready = torch.cuda.Event()
            update.ready.record(stream)
        return answers

    def _make_stream(self) -> None:
        """The calling thread's stream, which it begins with. None on a CPU, and without prefetching."""
        if self._depth and self._device.type == "cuda":
            self._of_thread.stream = torch.cuda.Stream(self._device, priority=-1)
            # The stream's device has a number, which the process's own may lack.
            torch.cuda.set_device(self._of_thread.stream.device)
            self._streams.append(self._of_thread.stream)

    @property
    def _stream(self) -> torch.cuda.Stream | None:
        return getattr(self._of_thread, "stream", None)

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        stream = self._stream
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _num_bytes(requests: Sequence[Request], answers: Sequence[Outputs]) -> int:
    inputs = [tensor for request in requests for tensor in request.inputs.values()]
    outputs = [tensor for outputs in answers for tensor in outputs.values()]
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in (*inputs, *outputs)}.values())
