"""`teacher.placement: custom`: one copy a node, each part where `teacher.device_map` says."""

from __future__ import annotations

from collections.abc import Sequence

from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher, TeacherMemory
from distiller.teachers.device_maps import DeviceMap
from distiller.teachers.spread import Spread


class CustomTeacher(Teacher):
    """A map from names to GPU numbers, `cpu` (one host copy) or `disk`, by Accelerate's convention.

    Every rank sends its own requests through all of it. On GPUs the ranks take turns, so all of a node call `predict`
    equally often; `close` communicates. `device_maps.check_custom_map` refuses a map that leaves something out.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        device_map: DeviceMap = dict(setup.options.device_map or {})
        self._spread = Spread(network, setup, lambda *_: device_map, reads_in_use="disk" in device_map.values())

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        return self._spread.predict(requests)

    def memory(self) -> TeacherMemory:
        return self._spread.memory()

    def close(self) -> None:
        self._spread.close()
