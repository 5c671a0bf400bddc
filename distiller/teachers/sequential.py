"""`teacher.placement: sequential`: one copy a node, which fills one GPU after the other."""

from __future__ import annotations

from collections.abc import Sequence

from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher, TeacherMemory
from distiller.teachers.device_maps import sequential_map
from distiller.teachers.spread import Spread


class SequentialTeacher(Teacher):
    """The first GPUs are filled up to what the student needs there, in Accelerate's way; the last may stay empty.

    Every rank sends its own requests through all GPUs in use. There the ranks take turns, so all of a node call
    `predict` equally often; `close` communicates.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        self._spread = Spread(network, setup, sequential_map)

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        return self._spread.predict(requests)

    def memory(self) -> TeacherMemory:
        return self._spread.memory()

    def close(self) -> None:
        self._spread.close()
