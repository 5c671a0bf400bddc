"""`teacher.placement: cached`: no teacher in memory; loaders read its stored outputs together with the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher, TeacherMemory


@final
class CachedTeacher(Teacher):
    """Returns `Request.stored` of each request, unchanged. Holds no weights and does not communicate."""

    def __init__(self, network: Network, setup: Setup) -> None:
        del network, setup

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        outputs = []
        for request in requests:
            assert request.stored is not None, "a cached teacher knows what its loader has read, and nothing else"
            outputs.append(request.stored)
        return outputs

    def memory(self) -> TeacherMemory:
        return TeacherMemory()

    def close(self) -> None:
        pass
