"""`teacher.placement: sequential`: one copy a node, which fills one GPU after the other."""

from __future__ import annotations

from distiller.teachers.base import Network, Setup
from distiller.teachers.device_map.maps import sequential_map
from distiller.teachers.device_map.teacher import DeviceMapTeacher


class SequentialTeacher(DeviceMapTeacher):
    """The first GPUs are filled up to what the student needs there, in Accelerate's way; the last may stay empty.

    Every rank sends its own requests through all GPUs in use. There the ranks take turns, so all of a node call
    `predict` equally often; `close` communicates.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        super().__init__(network, setup, sequential_map)
