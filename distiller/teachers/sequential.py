"""`teacher.placement: sequential`: one copy of the teacher for each node, which fills one GPU after the other."""

from __future__ import annotations

from typing import final

from distiller.config.teacher import Teacher as TeacherOptions
from distiller.teachers.device_map.maps import sequential_map
from distiller.teachers.device_map.teacher import DeviceMapTeacher, MapRule


@final
class SequentialTeacher(DeviceMapTeacher):
    """Fills the GPUs one by one, as Accelerate's `infer_auto_device_map`, except for what the student needs on each.

    The last GPUs may stay empty. Every rank runs its own requests on all GPUs in use, which run the ranks' passes in a
    fixed order. So all ranks call `predict` equally often; see `DeviceMapTeacher`. `close` communicates.
    """

    @staticmethod
    def map_rule(options: TeacherOptions) -> MapRule:
        del options
        return MapRule(sequential_map)
