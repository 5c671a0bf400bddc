"""`teacher.placement: sequential`: one copy a node, which fills one GPU after the other."""

from __future__ import annotations

from typing import final

from distiller.config.teacher import Teacher as TeacherOptions
from distiller.teachers.device_map.maps import sequential_map
from distiller.teachers.device_map.teacher import DeviceMapTeacher, MapRule


@final
class SequentialTeacher(DeviceMapTeacher):
    """The first GPUs are filled up to what the student needs there, in Accelerate's way; the last may stay empty.

    Every rank sends its own requests through all GPUs in use. There the ranks take turns, so all of a node call
    `predict` equally often; `close` communicates.
    """

    @staticmethod
    def map_rule(options: TeacherOptions) -> MapRule:
        del options
        return MapRule(sequential_map)
