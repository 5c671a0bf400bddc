"""`teacher.placement: balanced`: one copy a node, about equal shares of it on each of the node's GPUs."""

from __future__ import annotations

from distiller.teachers.base import Network, Setup
from distiller.teachers.device_map.maps import balanced_map
from distiller.teachers.device_map.teacher import DeviceMapTeacher


class BalancedTeacher(DeviceMapTeacher):
    """Shares as Accelerate balances them, between blocks. Every rank sends its own requests through all GPUs.

    There the ranks take turns, so all of a node call `predict` equally often; `close` communicates.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        super().__init__(network, setup, balanced_map)
