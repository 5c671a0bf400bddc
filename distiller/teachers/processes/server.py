"""A process of the teacher: holds the weights and answers the machine's ranks until they have gone.

Started by `TeacherProcesses` through `distiller.distributed.child_process`. The argument is an open descriptor: one end
of a pipe, through which come the import path and a `Start`, and goes `Ready` or `Failure`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from typing import Any, final

import torch

from distiller.config.placements.dedicated import INNER
from distiller.distributed.devices import quiet_libraries, set_tf32
from distiller.distributed.ranks import Ranks
from distiller.errors import RunError, UserError
from distiller.teachers.base import Request, Setup, Teacher
from distiller.teachers.factory import open_teacher
from distiller.teachers.processes.buffers import SharedBuffer, finish_copies, grown, lay_out
from distiller.teachers.processes.messages import HOST, Answer, Failure, NeedBuffer, NewBuffer, Question, Ready, Start

GONE = (EOFError, ConnectionError)


@final
class Desk:
    """Answers the questions of one rank, whose buffers it keeps."""

    def __init__(self, teacher: Teacher, device: torch.device) -> None:
        self._teacher, self._device = teacher, device
        self._inputs: SharedBuffer | None = None
        self._outputs: SharedBuffer | None = None

    def reply(self, message: NeedBuffer | Question) -> NewBuffer | Answer | Failure:
        """What to send for a message."""
        try:
            if isinstance(message, Question):
                return self._answer(message)
            # The old one is freed first.
            old_bytes, self._inputs = 0 if self._inputs is None else self._inputs.num_bytes, None
            self._inputs = SharedBuffer.make(grown(old_bytes, message.num_bytes), self._device)
            return NewBuffer(self._inputs.handle)
        except Exception as error:
            traceback.print_exc()
            return failure_of(error)

    def _answer(self, question: Question) -> Answer:
        assert self._inputs is not None
        requests = []
        for part in question.parts:
            inputs = dict(zip(part.inputs, self._inputs.views(list(part.inputs.values())), strict=True))
            requests.append(Request(part.sample_ids, inputs, part.wanted, part.modules))
        answers = self._teacher.predict(requests)
        tensors = [tensor for outputs in answers for tensor in outputs.values()]
        specs, num_bytes = lay_out(tensors)
        new_buffer, old_bytes = None, 0 if self._outputs is None else self._outputs.num_bytes
        # The rank says what it has: it may have failed to open the buffer of the last answer.
        if self._outputs is None or question.known_bytes != old_bytes or old_bytes < num_bytes:
            self._outputs = None
            self._outputs = SharedBuffer.make(grown(old_bytes, num_bytes), self._device)
            new_buffer = self._outputs.handle
        self._outputs.write(specs, tensors)
        finish_copies(self._device)
        places = iter(specs)
        return Answer(tuple({name: next(places) for name in outputs} for outputs in answers), new_buffer)


def failure_of(error: Exception) -> Failure:
    """The error in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return Failure(f"{str(error).partition('. ')[0]}; lower train.batch_size, or set teacher.inner=streamed")
    text = str(error) if isinstance(error, UserError | RunError) else f"{type(error).__name__}: {error}"
    return Failure(" ".join(text.split()), isinstance(error, UserError))


def serve(ranks: list[Connection], teacher: Teacher, device: torch.device) -> None:
    """Answers until every rank has closed its connection or ended."""
    desks = {connection: Desk(teacher, device) for connection in ranks}
    while desks:
        for connection in wait(list(desks)):
            assert isinstance(connection, Connection)
            try:
                connection.send(desks[connection].reply(connection.recv()))
            except GONE:
                del desks[connection]


def open_started(start: Start) -> tuple[Teacher, torch.device]:
    """The teacher of this process, loaded. Raises UserError before any weight is read."""
    device = torch.device(start.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    set_tf32(start.allows_tf32)
    torch.use_deterministic_algorithms(start.is_deterministic, warn_only=True)
    torch.set_num_threads(start.num_threads)
    quiet_libraries()
    setup = Setup(
        start.dtype,
        start.options,
        Ranks.join(device),
        reserved_bytes=start.reserved_bytes,
        compile_mode=start.compile_mode,
        stages_dir=start.stages_dir,
        alternatives=INNER,
    )
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        # What is chosen is the same in all processes: one of them says it.
        said = contextlib.nullcontext() if start.is_first else contextlib.redirect_stdout(nowhere)
        with said:
            return open_teacher(start.network, setup), device


def accept(listener: Listener, num_ranks: int) -> list[Connection]:
    """A connection to each rank; others of this machine that do not know the run's secret are turned away."""
    ranks: list[Any] = []
    while len(ranks) < num_ranks:
        with contextlib.suppress(AuthenticationError, *GONE):
            ranks.append(listener.accept())
    return ranks


def main(descriptor: str) -> int:
    """Runs the process; returns its exit code."""
    pipe: Any = Connection(int(descriptor))
    try:
        sys.path[:] = pickle.loads(pipe.recv_bytes())
        start: Start = pickle.loads(pipe.recv_bytes())
        teacher, device = open_started(start)
    except GONE:
        return 1
    except Exception as error:
        if not isinstance(error, UserError | RunError):
            traceback.print_exc()
        pipe.send(failure_of(error))
        return 1
    with Listener((HOST, 0), backlog=start.num_ranks, authkey=start.authkey) as listener:
        pipe.send(Ready(int(listener.address[1]), teacher.memory()))
        ranks = accept(listener, start.num_ranks)
    serve(ranks, teacher, device)
    teacher.close()
    return 0
