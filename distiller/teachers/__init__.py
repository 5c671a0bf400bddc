"""The frozen teacher: one class for each placement, whose specification is in `distiller.config.placements`."""

from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher, TeacherMemory

__all__ = ["Network", "Outputs", "Request", "Setup", "Teacher", "TeacherMemory"]
