"""`teacher.placement: custom`: one copy of the teacher for each node, placed as `teacher.device_map` says."""

from __future__ import annotations

from typing import final

from distiller.config.placements.custom import CustomOptions
from distiller.config.teacher import Teacher as TeacherOptions
from distiller.teachers.device_map.maps import DeviceMap
from distiller.teachers.device_map.teacher import DeviceMapTeacher, MapRule


@final
class CustomTeacher(DeviceMapTeacher):
    """The map has Accelerate's form: name of a submodule or tensor -> GPU number, `cpu` (one host copy) or `disk`.

    Every rank runs its own requests on all of these devices. GPUs run the ranks' passes in a fixed order, so all ranks
    call `predict` equally often; see `DeviceMapTeacher`. `close` communicates. `maps.check_custom_map` refuses a map
    that leaves a tensor out.
    """

    @staticmethod
    def map_rule(options: TeacherOptions) -> MapRule:
        given: DeviceMap = dict(CustomOptions.of(options).device_map or {})
        return MapRule(lambda *_: given, given)
