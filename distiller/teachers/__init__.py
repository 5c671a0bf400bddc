"""Where the teacher lives: one file and one class a placement, chosen by `teacher.placement`."""

from collections.abc import Callable

from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher, TeacherMemory
from distiller.teachers.replicated import ReplicatedTeacher

PLACEMENTS: dict[str, Callable[[Network, Setup], Teacher]] = {
    "replicated": ReplicatedTeacher,
}

__all__ = ["PLACEMENTS", "Network", "Outputs", "Request", "Setup", "Teacher", "TeacherMemory"]
