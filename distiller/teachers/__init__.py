"""Where the teacher lives: one file and one class a placement, chosen by `teacher.placement`."""

from distiller.teachers.base import Network, Outputs, Request, Teacher, TeacherMemory
from distiller.teachers.replicated import ReplicatedTeacher

PLACEMENTS: dict[str, type[ReplicatedTeacher]] = {"replicated": ReplicatedTeacher}

__all__ = ["PLACEMENTS", "Network", "Outputs", "Request", "Teacher", "TeacherMemory"]
