"""`teacher.placement: balanced`: one copy of the teacher for each node, about equal shares on the node's GPUs."""

from __future__ import annotations

from typing import final

from distiller.config.teacher import Teacher as TeacherOptions
from distiller.teachers.device_map.maps import balanced_map
from distiller.teachers.device_map.teacher import DeviceMapTeacher, MapRule


@final
class BalancedTeacher(DeviceMapTeacher):
    """The shares are those of Accelerate's `get_balanced_memory`; no block is split.

    Every rank runs its own requests on all GPUs, which run the ranks' passes in a fixed order. So all ranks call
    `predict` equally often; see `DeviceMapTeacher`. `close` communicates.
    """

    @staticmethod
    def map_rule(options: TeacherOptions) -> MapRule:
        del options
        return MapRule(balanced_map)
