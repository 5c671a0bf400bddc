"""Where the teacher lives: one file and one class a placement, chosen by `teacher.placement`."""

from collections.abc import Callable

from distiller.teachers.balanced import BalancedTeacher
from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher, TeacherMemory
from distiller.teachers.cached import CachedTeacher
from distiller.teachers.cpu import CpuTeacher
from distiller.teachers.custom import CustomTeacher
from distiller.teachers.disk import DiskTeacher
from distiller.teachers.rank0 import Rank0Teacher
from distiller.teachers.replicated import ReplicatedTeacher
from distiller.teachers.sequential import SequentialTeacher
from distiller.teachers.sharded import ShardedTeacher
from distiller.teachers.streamed import StreamedTeacher
from distiller.teachers.swap import SwapTeacher

PLACEMENTS: dict[str, Callable[[Network, Setup], Teacher]] = {
    "replicated": ReplicatedTeacher,
    "rank0": Rank0Teacher,
    "swap": SwapTeacher,
    "cpu": CpuTeacher,
    "streamed": StreamedTeacher,
    "disk": DiskTeacher,
    "balanced": BalancedTeacher,
    "sequential": SequentialTeacher,
    "custom": CustomTeacher,
    "sharded": ShardedTeacher,
    "cached": CachedTeacher,
}

__all__ = ["PLACEMENTS", "Network", "Outputs", "Request", "Setup", "Teacher", "TeacherMemory"]
