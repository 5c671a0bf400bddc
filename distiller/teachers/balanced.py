"""`teacher.placement: balanced`: one copy a node, about equal shares of it on each of the node's GPUs."""

from __future__ import annotations

from typing import final

from distiller.config.teacher import Teacher as TeacherOptions
from distiller.teachers.device_map.maps import balanced_map
from distiller.teachers.device_map.teacher import DeviceMapTeacher, MapRule


@final
class BalancedTeacher(DeviceMapTeacher):
    """Shares as Accelerate balances them, between blocks. Every rank sends its own requests through all GPUs.

    There the ranks take turns, so all of a node call `predict` equally often; `close` communicates.
    """

    @staticmethod
    def map_rule(options: TeacherOptions) -> MapRule:
        del options
        return MapRule(balanced_map)
