"""`teacher.placement: replicated`: the whole teacher on every rank's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher, TeacherMemory, answer, run_module_calls
from distiller.teachers.quantization.modules import plan_quantized_modules
from distiller.teachers.weights.layout import own_buffer_bytes
from distiller.teachers.weights.loading import load_on_all_ranks


@final
class ReplicatedTeacher(Teacher):
    """Every rank holds all modules on its own device and answers its own requests; communicates only while loading."""

    def __init__(self, network: Network, setup: Setup) -> None:
        self._network, self._setup = network, setup
        plans = plan_quantized_modules(network, setup, is_reader=setup.ranks.is_main)
        self._num_bytes = 0
        for plan in plans:
            self._num_bytes += load_on_all_ranks(plan, plan.units, setup.ranks) + own_buffer_bytes(plan.module)
            plan.close_files()
        self._modules = {plan.name: plan.module for plan in plans}

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        return answer(self._network, requests, lambda agenda: run_module_calls(self._network, self._modules, agenda))

    def memory(self) -> TeacherMemory:
        if self._setup.ranks.device.type == "cpu":
            return TeacherMemory(host_bytes=self._num_bytes * self._setup.ranks.local_world_size)
        return TeacherMemory(gpu_bytes=self._num_bytes)

    def close(self) -> None:
        self._modules.clear()
        self._num_bytes = 0
