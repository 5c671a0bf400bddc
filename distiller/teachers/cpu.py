"""`teacher.placement: cpu`: the teacher computes on the CPU, from one copy that the node's ranks share."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from distiller.teachers.base import (
    Call,
    ModuleCalls,
    Network,
    Outputs,
    Request,
    Setup,
    Teacher,
    TeacherMemory,
    answer,
    move_call,
    run_module_calls,
)
from distiller.teachers.streaming.block_offload import OffloadedBlock, OffloadedModules, allocate_buffers
from distiller.teachers.streaming.copiers import ThreadCopier
from distiller.teachers.weights.host_copy import HostCopy
from distiller.teachers.weights.layout import bind, lay_out, own_buffer_bytes
from distiller.teachers.weights.loading import ModulePlan, load_units, plan_modules

CPU = torch.device("cpu")
NUM_WIDE_SLOTS = 2


class CpuTeacher(Teacher):
    """Every rank computes its own answers, with its share of the node's cores.

    Weights are held in `teacher.dtype`. A CPU may compute several times faster in float32 than in 16 bits; one block is
    timed in both at the first call, and where float32 wins the blocks are widened one by one as they are needed.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        self._network, self._ranks, self._dtype = network, setup.ranks, setup.dtype
        plans = plan_modules(network, setup, is_reader=setup.ranks.is_local_main)
        places = [(plan, unit) for plan in plans for unit in plan.units]
        self._host = HostCopy.make([unit.num_bytes for _, unit in places], setup.ranks)
        setup.ranks.all_succeed(lambda: self._fill(plans) if setup.ranks.is_local_main else None)
        self._modules: dict[str, nn.Module] = {}
        for number, (plan, unit) in enumerate(places):
            bind(plan.module, unit, self._host.piece(number))
            self._modules[plan.name] = plan.module
        self._own_bytes = sum(own_buffer_bytes(module) for module in self._modules.values())
        self._wide: _WideModules | None = None
        self._is_decided = setup.dtype == torch.float32

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        with _threads(self._ranks.local_world_size):
            return answer(self._network, requests, self._run)

    def memory(self) -> TeacherMemory:
        own = self._own_bytes + (self._wide.num_bytes if self._wide else 0)
        return TeacherMemory(host_bytes=self._host.num_bytes + own * self._ranks.local_world_size)

    def close(self) -> None:
        if self._wide is not None:
            self._wide.close()
            self._wide = None
        self._modules.clear()
        self._host.close()

    def _fill(self, plans: Sequence[ModulePlan]) -> None:
        sources = [(unit, plan.files) for plan in plans for unit in plan.units if plan.files is not None]
        load_units(sources, [self._host.piece(number) for number in range(len(sources))])
        for plan in plans:
            plan.close_files()

    def _run(self, agenda: ModuleCalls) -> list[list[Outputs]]:
        here = [(name, [move_call(call, CPU) for call in calls]) for name, calls in agenda]
        if not self._is_decided:
            self._decide(here[0][1][0])
        if self._wide is not None:
            results = self._wide.passing.run(here)
        else:
            results = run_module_calls(self._network, self._modules, here)
        device = self._ranks.device
        return [[{key: value.to(device) for key, value in one.items()} for one in part] for part in results]

    def _decide(self, call: Call) -> None:
        """Chooses between `teacher.dtype` and float32 by one block's time on rank 0. Communicates, once."""
        name, wide = call.module, _WideModules(self._network, self._modules, self._host)

        def ratio() -> float:
            block = self._network.block_names(name)[0]
            narrow_s = _block_time(self._network, self._modules[name], block, call)
            wide_s = _block_time(self._network, wide.modules[name], block, call)
            return narrow_s / wide_s

        speed = self._ranks.broadcast_from_main(ratio)
        self._is_decided, own_name = True, str(self._dtype).removeprefix("torch.")
        if speed > 1:
            self._wide = wide
        else:
            wide.close()
        if self._ranks.is_main:
            chosen = f"float32, {speed:.1f} times as fast as" if speed > 1 else f"{own_name}, float32 is no faster than"
            print(f"teacher.placement cpu: a block computes in {chosen} {own_name} here")


class _WideModules:
    """The same modules in float32: everything but the blocks widened once, the blocks as they come to run."""

    def __init__(self, network: Network, narrow: Mapping[str, nn.Module], host: HostCopy) -> None:
        self.modules: dict[str, nn.Module] = {}
        units, self._sources, self.num_bytes, number = [], [], 0, 0
        for name, module in narrow.items():
            wide = network.skeleton(name, torch.float32)
            blocks = network.block_names(name)
            for ours, theirs in zip(lay_out(wide, blocks), lay_out(module, blocks), strict=True):
                source = host.piece(number)
                number += 1
                if ours.name in blocks:
                    units.append(OffloadedBlock(name, wide, ours))
                    self._sources.append((ours, theirs, source))
                    continue
                buffer = torch.empty(ours.num_bytes, dtype=torch.uint8)
                _widen(ours, theirs, source, buffer)
                bind(wide, ours, buffer)
                self.num_bytes += buffer.nbytes
            self.modules[name] = wide
        slots = allocate_buffers(max(passing.unit.num_bytes for passing in units), min(NUM_WIDE_SLOTS, len(units)), CPU)
        self.num_bytes += sum(slot.data.nbytes for slot in slots)
        feed = ThreadCopier(partial(_widen_unit, self._sources))
        self.passing = OffloadedModules(network, dict(self.modules), units, slots, feed, CPU, amortise=True)

    def close(self) -> None:
        """Lets go of the host copy, of which the sources are parts."""
        self.passing.close()
        self.modules.clear()
        self._sources.clear()


def _widen_unit(sources: list, unit: int, buffer: Tensor) -> None:
    ours, theirs, source = sources[unit]
    _widen(ours, theirs, source, buffer)


def _widen(ours, theirs, source: Tensor, buffer: Tensor) -> None:
    for wide, narrow in zip(ours.entries, theirs.entries, strict=True):
        wide.view(buffer).copy_(narrow.view(source))


class _BlockRan(Exception):  # noqa: N818
    """Ends a forward pass of which only the first block was to be timed."""


def _block_time(network: Network, module: nn.Module, block_name: str, call: Call) -> float:
    """Seconds of one block on the call's own input, weights brought in included; the second of two runs."""
    started = 0.0

    def start(*_: object) -> None:
        nonlocal started
        started = time.perf_counter()

    def stop(*_: object) -> None:
        raise _BlockRan

    block, seconds = module.get_submodule(block_name), 0.0
    handles = [block.register_forward_pre_hook(start, prepend=True), block.register_forward_hook(stop)]
    try:
        for _ in range(2):
            try:
                network.run(module, call)
            except _BlockRan:
                seconds = time.perf_counter() - started
    finally:
        for handle in handles:
            handle.remove()
    return max(seconds, 1e-9)


@contextmanager
def _threads(num_ranks: int) -> Iterator[None]:
    """Gives this rank its share of the cores: launchers give each of several processes one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // num_ranks, 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)
