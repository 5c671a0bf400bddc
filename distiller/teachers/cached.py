"""`cached`: no teacher at all; loader processes have read its outputs beside the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher, TeacherMemory


@final
class CachedTeacher(Teacher):
    """Hands on what the requests carry, bit for bit as it was stored."""

    def __init__(self, network: Network, setup: Setup) -> None:
        del network, setup

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        answers = []
        for request in requests:
            assert request.stored is not None, "a cached teacher knows what its loader has read, and nothing else"
            answers.append(request.stored)
        return answers

    def memory(self) -> TeacherMemory:
        return TeacherMemory()

    def close(self) -> None:
        pass
