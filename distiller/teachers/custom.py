"""`teacher.placement: custom`: one copy a node, each part where `teacher.device_map` says."""

from __future__ import annotations

from typing import final

from distiller.config.placements.custom import CustomOptions
from distiller.config.teacher import Teacher as TeacherOptions
from distiller.teachers.device_map.maps import DeviceMap
from distiller.teachers.device_map.teacher import DeviceMapTeacher, MapRule


@final
class CustomTeacher(DeviceMapTeacher):
    """A map from names to GPU numbers, `cpu` (one host copy) or `disk`, by Accelerate's convention.

    Every rank sends its own requests through all of it. On GPUs the ranks take turns, so all of a node call `predict`
    equally often; `close` communicates. `maps.check_custom_map` refuses a map that leaves something out.
    """

    @staticmethod
    def map_rule(options: TeacherOptions) -> MapRule:
        given: DeviceMap = dict(CustomOptions.of(options).device_map or {})
        return MapRule(lambda *_: given, given)
