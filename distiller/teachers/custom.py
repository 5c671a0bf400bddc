"""`teacher.placement: custom`: one copy a node, each part where `teacher.device_map` says."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher, TeacherMemory
from distiller.teachers.device_maps import DeviceMap, check_custom_map
from distiller.teachers.spread import Spread


class CustomTeacher(Teacher):
    """A map from names to GPU numbers, `cpu` (one host copy) or `disk`, by Accelerate's convention.

    Every rank sends its own requests through all of it. `predict` does not communicate; `close` does. Raises UserError
    for a map that leaves something out, or names what there is not.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        device_map: DeviceMap = dict(setup.options.device_map or {})
        num_devices = torch.cuda.device_count() if setup.ranks.device.type == "cuda" else setup.ranks.local_world_size
        modules = [network.skeleton(name, setup.dtype) for name in network.module_names]
        setup.ranks.all_succeed(lambda: check_custom_map(device_map, modules, num_devices))
        self._spread = Spread(network, setup, lambda *_: device_map, reads_in_use="disk" in device_map.values())

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        return self._spread.predict(requests)

    def memory(self) -> TeacherMemory:
        return self._spread.memory()

    def close(self) -> None:
        self._spread.close()
