"""A rank's side of the connection to a process of the teacher."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection
from typing import Any, TypeVar, final

import torch

from distiller.errors import RunError
from distiller.teachers.base import Outputs, Request
from distiller.teachers.processes.buffers import SharedBuffer, finish_copies, lay_out
from distiller.teachers.processes.messages import Answer, Failure, NeedBuffer, NewBuffer, Question, QuestionPart

MessageT = TypeVar("MessageT")


@final
class Channel:
    """Sends requests to one process of the teacher and receives its answers, one question at a time.

    Attributes:
        lock: held from `send` until `receive` has returned.
    """

    def __init__(self, address: tuple[str, int], authkey: bytes, name: str, device: torch.device) -> None:
        """`name`: of the process, for messages; `device`: where inputs are and outputs will be."""
        connection = Client(address, authkey=authkey)
        assert isinstance(connection, Connection)
        self._connection, self._name, self._device = connection, name, device
        self._inputs: SharedBuffer | None = None
        self._outputs: SharedBuffer | None = None
        self.lock = threading.Lock()

    def send(self, requests: Sequence[Request]) -> None:
        """Sends requests. The host waits until the inputs have been copied, and so for what they are computed from.

        Raises RunError where the process has ended or has no memory for them.
        """
        tensors = [tensor for request in requests for tensor in request.inputs.values()]
        # A copy from elsewhere would be on another stream than the one that is waited for.
        assert all(tensor.device.type == self._device.type for tensor in tensors)
        specs, num_bytes = lay_out(tensors)
        if self._inputs is None or self._inputs.num_bytes < num_bytes:
            self._inputs = None
            self._send(NeedBuffer(num_bytes))
            self._inputs = SharedBuffer.open(self._receive(NewBuffer).handle)
        self._inputs.write(specs, tensors)
        finish_copies(self._device)
        places = iter(specs)
        parts = [
            QuestionPart(r.sample_ids, {name: next(places) for name in r.inputs}, r.wanted, r.modules) for r in requests
        ]
        self._send(Question(tuple(parts), 0 if self._outputs is None else self._outputs.num_bytes))

    def receive(self) -> list[Outputs]:
        """Outputs of the requests that were sent last, on this rank's device. The host waits until they are copied.

        Only then may another thread, on a stream of its own, send what the next outputs overwrite these with. Raises
        RunError where the process has failed or ended.
        """
        answer = self._receive(Answer)
        if answer.new_buffer is not None:
            self._outputs = None
            self._outputs = SharedBuffer.open(answer.new_buffer)
        assert self._outputs is not None
        results = []
        for places in answer.outputs:
            views = self._outputs.views(list(places.values()))
            copies = [view.to(self._device, non_blocking=True, copy=True) for view in views]
            results.append(dict(zip(places, copies, strict=True)))
        finish_copies(self._device)
        return results

    def close(self) -> None:
        """Ends the connection, also for a thread that waits for an answer. Once all ranks have, the process ends.

        Not only this descriptor is closed: processes that were forked since, such as loader processes, have copies.
        """
        self._inputs = self._outputs = None
        if not self._connection.closed:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as copy:
                copy.shutdown(socket.SHUT_RDWR)
            self._connection.close()

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except (OSError, ValueError) as error:
            raise self._gone() from error

    def _receive(self, kind: type[MessageT]) -> MessageT:
        try:
            message = self._connection.recv()
        except (EOFError, OSError, TypeError) as error:
            # TypeError: another thread has closed the connection.
            raise self._gone() from error
        if isinstance(message, Failure):
            raise RunError(f"{self._name}: {message.text}")
        assert isinstance(message, kind)
        return message

    def _gone(self) -> RunError:
        return RunError(f"{self._name} has ended; what it said, if anything, is above; continue with --resume")
