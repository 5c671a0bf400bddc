"""`teacher.placement: custom`: one copy a node, each part where `teacher.device_map` says."""

from __future__ import annotations

from distiller.teachers.base import Network, Setup
from distiller.teachers.device_map.maps import DeviceMap
from distiller.teachers.device_map.teacher import DeviceMapTeacher


class CustomTeacher(DeviceMapTeacher):
    """A map from names to GPU numbers, `cpu` (one host copy) or `disk`, by Accelerate's convention.

    Every rank sends its own requests through all of it. On GPUs the ranks take turns, so all of a node call `predict`
    equally often; `close` communicates. `device_maps.check_custom_map` refuses a map that leaves something out.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        device_map: DeviceMap = dict(setup.options.device_map or {})
        super().__init__(network, setup, lambda *_: device_map, allows_disk="disk" in device_map.values())
