"""`teacher.placement: replicated`: the whole teacher on every rank's device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distiller.teachers.base import Network, Outputs, Request, Teacher, TeacherMemory


class ReplicatedTeacher(Teacher):
    """Every rank holds all modules on its own device and answers its own requests; does not communicate."""

    def __init__(self, network: Network, dtype: torch.dtype, device: torch.device) -> None:
        self._network, self._device = network, device
        self._modules = {name: network.load(name, dtype, device) for name in network.module_names}

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        # no_grad, not inference_mode: inference tensors cannot be saved for the student's backward.
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            return [self._network.forward(self._modules, request) for request in requests]

    def memory(self) -> TeacherMemory:
        by_module = {
            name: sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
            for name, module in self._modules.items()
        }
        total = sum(by_module.values())
        on_gpu = self._device.type != "cpu"
        return TeacherMemory(total if on_gpu else 0, 0 if on_gpu else total, by_module)

    def close(self) -> None:
        self._modules.clear()
