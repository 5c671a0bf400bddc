"""`teacher.placement: balanced`: one copy a node, about equal shares of it on each of the node's GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher, TeacherMemory
from distiller.teachers.device_maps import balanced_map
from distiller.teachers.spread import Spread


class BalancedTeacher(Teacher):
    """Shares as Accelerate balances them, between blocks. Every rank sends its own requests through all GPUs.

    On GPUs the ranks take turns, so all of a node call `predict` equally
    often; `close` communicates.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        self._spread = Spread(network, setup, balanced_map)

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        return self._spread.predict(requests)

    def memory(self) -> TeacherMemory:
        return self._spread.memory()

    def close(self) -> None:
        self._spread.close()
