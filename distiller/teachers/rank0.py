"""`teacher.placement: rank0`: the whole teacher on one rank's device, which runs the requests of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from distiller.config.placements.rank0 import Rank0Options
from distiller.teachers.base import Call, ModuleCalls, Network, Outputs, Request, Setup, Teacher, TeacherMemory, answer
from distiller.teachers.quantization.modules import plan_quantized_modules
from distiller.teachers.single_rank.exchange import Exchange
from distiller.teachers.weights.layout import bind, move_own_buffers, own_buffer_bytes
from distiller.teachers.weights.loading import ModulePlan, read_to_device, staging_buffer


@final
class Rank0Teacher(Teacher):
    """One rank (`teacher.rank`) holds all modules and runs all ranks' calls; calls of the same kind run as one batch.

    The other ranks hold no weights, and wait while this rank computes. Loading and `predict` communicate.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        options, ranks = Rank0Options.of(setup.options), setup.ranks
        self._network, self._micro_batch = network, options.micro_batch
        self._modules: dict[str, nn.Module] = {}
        plans = plan_quantized_modules(network, setup, is_reader=ranks.rank == options.rank)
        # Ranks wait for the load here, over gloo with a long timeout; in the first exchange the timeout is short.
        num_bytes = ranks.all_succeed(lambda: sum(self._load(plan, ranks.device) for plan in plans))
        self._memory = TeacherMemory(gpu_bytes=num_bytes)
        if ranks.device.type == "cpu":
            self._memory = TeacherMemory(host_bytes=sum(ranks.gather_on_node(num_bytes)))
        group = ranks.new_device_group() if setup.options.prefetch_steps and ranks.world_size > 1 else None
        self._exchange = Exchange(ranks, options.rank, self._run, group)

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        return answer(self._network, requests, self._run_agenda)

    def memory(self) -> TeacherMemory:
        return self._memory

    def close(self) -> None:
        self._modules.clear()
        self._memory = TeacherMemory()

    def _load(self, plan: ModulePlan, device: torch.device) -> int:
        """Loads a module on the rank that holds the teacher; returns the bytes that it takes on this rank, else 0."""
        if plan.files is None:
            return 0
        staging = staging_buffer(plan.units, device)
        for unit in plan.units:
            buffer = torch.empty(unit.num_bytes, dtype=torch.uint8, device=device)
            read_to_device(plan.files, unit, buffer, staging)
            bind(plan.module, unit, buffer)
        move_own_buffers(plan.module, device)
        plan.close_files()
        self._modules[plan.name] = plan.module
        return sum(unit.num_bytes for unit in plan.units) + own_buffer_bytes(plan.module)

    def _run_agenda(self, agenda: ModuleCalls) -> list[list[Outputs]]:
        answered = iter(self._exchange.answer([call for _, calls in agenda for call in calls]))
        return [[next(answered) for _ in calls] for _, calls in agenda]

    def _run(self, call: Call) -> Outputs:
        """Runs all ranks' rows of one kind of call, `micro_batch` rows in a forward pass."""
        module, num_rows = self._modules[call.module], len(next(iter(call.inputs.values())))
        step = self._micro_batch or num_rows
        if num_rows <= step:
            return self._network.run(module, call)
        whole: Outputs = {}
        for start in range(0, num_rows, step):
            rows = slice(start, start + step)
            inputs = {name: value[rows] for name, value in call.inputs.items()}
            for name, part in self._network.run(module, Call(call.module, inputs, call.wanted)).items():
                # Copied into the whole output at once: concatenating the parts at the end would hold all outputs twice.
                whole.setdefault(name, part.new_empty(num_rows, *part.shape[1:]))[rows] = part
        return whole
