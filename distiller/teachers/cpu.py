"""`teacher.placement: cpu`: the teacher computes on the CPU, from one copy of its weights for each node."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from distiller.config.placements.cpu import NUM_FLOAT32_BUFFERS
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
from distiller.teachers.quantization.modules import plan_quantized_modules
from distiller.teachers.streaming.block_offload import OffloadedBlock, OffloadedModules, allocate_buffers
from distiller.teachers.streaming.copiers import ThreadCopier
from distiller.teachers.weights.host_copy import HostCopy
from distiller.teachers.weights.layout import bind, lay_out, own_buffer_bytes
from distiller.teachers.weights.loading import ModulePlan, load_units

CPU = torch.device("cpu")


@final
class CpuTeacher(Teacher):
    """Every rank answers its own requests, with its share of the node's cores; the node's ranks share the weights.

    Weights are held in `teacher.dtype`, or quantised. A CPU may compute several times faster in float32 than in 16
    bits. So the first `predict` times one block in both on rank 0; if float32 is faster, blocks are converted one by
    one before they run; quantised ones are not.
    Communicates while loading and in the first `predict`.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        self._network, self._ranks, self._dtype = network, setup.ranks, setup.dtype
        plans = plan_quantized_modules(network, setup, is_reader=setup.ranks.is_local_main)
        units = [(plan, unit) for plan in plans for unit in plan.units]
        self._host = HostCopy.make([unit.num_bytes for _, unit in units], setup.ranks)
        setup.ranks.all_succeed(lambda: self._fill(plans) if setup.ranks.is_local_main else None)
        self._modules: dict[str, nn.Module] = {}
        for index, (plan, unit) in enumerate(units):
            bind(plan.module, unit, self._host.piece(index))
            self._modules[plan.name] = plan.module
        self._own_bytes = sum(own_buffer_bytes(module) for module in self._modules.values())
        self._float32_modules: _Float32Modules | None = None
        has_blocks = any(network.block_names(plan.name) for plan in plans)
        is_quantized = setup.options.quantization != "none"
        self._is_decided = setup.dtype == torch.float32 or is_quantized or not has_blocks

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        with _threads(self._ranks.local_world_size):
            return answer(self._network, requests, self._run)

    def memory(self) -> TeacherMemory:
        own = self._own_bytes + (self._float32_modules.num_bytes if self._float32_modules else 0)
        return TeacherMemory(host_bytes=self._host.num_bytes + own * self._ranks.local_world_size)

    def close(self) -> None:
        if self._float32_modules is not None:
            self._float32_modules.close()
            self._float32_modules = None
        self._modules.clear()
        self._host.close()

    def _fill(self, plans: Sequence[ModulePlan]) -> None:
        sources = [(unit, plan.files) for plan in plans for unit in plan.units if plan.files is not None]
        load_units(sources, [self._host.piece(index) for index in range(len(sources))])
        for plan in plans:
            plan.close_files()

    def _run(self, agenda: ModuleCalls) -> list[list[Outputs]]:
        cpu_agenda = [(name, [move_call(call, CPU) for call in calls]) for name, calls in agenda]
        if not self._is_decided:
            self._decide(cpu_agenda[0][1][0])
        if self._float32_modules is not None:
            results = self._float32_modules.offloaded_modules.run(cpu_agenda)
        else:
            results = run_module_calls(self._network, self._modules, cpu_agenda)
        device = self._ranks.device
        return [
            [{key: value.to(device) for key, value in outputs.items()} for outputs in module_outputs]
            for module_outputs in results
        ]

    def _decide(self, call: Call) -> None:
        """Chooses `teacher.dtype` or float32, by the time of one block on rank 0; called once. Communicates."""
        name, float32_modules = call.module, _Float32Modules(self._network, self._modules, self._host)

        def ratio() -> float:
            blocks = self._network.block_names(name)[:2]
            if not blocks:
                return math.nan
            own_dtype_s = _block_time(self._network, self._modules[name], blocks, call)
            copy_blocks = partial(float32_modules.offloaded_modules.prefetch, name, len(blocks))
            return own_dtype_s / _block_time(self._network, float32_modules.modules[name], blocks, call, copy_blocks)

        # Not a number where the call leaves these blocks out: then nothing is compared, and `teacher.dtype` stays.
        speed = self._ranks.broadcast_from_main(ratio)
        self._is_decided, own_name = True, str(self._dtype).removeprefix("torch.")
        if speed > 1:
            self._float32_modules = float32_modules
        else:
            float32_modules.close()
        if self._ranks.is_main:
            chosen = f"float32, {speed:.1f} times as fast as" if speed > 1 else f"{own_name}, float32 is no faster than"
            print(f"teacher.placement cpu: a block computes in {chosen} {own_name} here")


@final
class _Float32Modules:
    """The modules in float32: blocks are converted each time they run, everything else once.

    Attributes:
        num_bytes: of the buffers and of the float32 weights outside of blocks.
    """

    def __init__(self, network: Network, modules: Mapping[str, nn.Module], host: HostCopy) -> None:
        self.modules: dict[str, nn.Module] = {}
        offloaded, self._sources, self.num_bytes, index = [], [], 0, 0
        for name, module in modules.items():
            float32_module = network.skeleton(name, torch.float32)
            blocks = network.block_names(name)
            for float32_unit, held_unit in zip(lay_out(float32_module, blocks), lay_out(module, blocks), strict=True):
                source = host.piece(index)
                index += 1
                if float32_unit.name in blocks:
                    offloaded.append(OffloadedBlock(name, float32_module, float32_unit))
                    self._sources.append((float32_unit, held_unit, source))
                    continue
                buffer = torch.empty(float32_unit.num_bytes, dtype=torch.uint8)
                _convert(float32_unit, held_unit, source, buffer)
                bind(float32_module, float32_unit, buffer)
                self.num_bytes += buffer.nbytes
            self.modules[name] = float32_module
        buffers = allocate_buffers(
            max(block.unit.num_bytes for block in offloaded), min(NUM_FLOAT32_BUFFERS, len(offloaded)), CPU
        )
        self.num_bytes += sum(pool_buffer.data.nbytes for pool_buffer in buffers)
        copier = ThreadCopier(partial(_convert_unit, self._sources))
        self.offloaded_modules = OffloadedModules(
            network, dict(self.modules), offloaded, buffers, copier, CPU, amortise=True
        )

    def close(self) -> None:
        """Ends the thread that converts, and drops the references to the host copy."""
        self.offloaded_modules.close()
        self.modules.clear()
        self._sources.clear()


def _convert_unit(sources: list, unit: int, buffer: Tensor) -> None:
    """Converts the block with index `unit` in `sources` to float32, into `buffer`."""
    float32_unit, held_unit, source = sources[unit]
    _convert(float32_unit, held_unit, source, buffer)


def _convert(float32_unit, held_unit, source: Tensor, buffer: Tensor) -> None:
    """Converts a unit from `source` (layout: `held_unit`) to `buffer` (`float32_unit`): uint8, 1-D, on the CPU."""
    for float32_entry, held_entry in zip(float32_unit.entries, held_unit.entries, strict=True):
        float32_entry.view(buffer).copy_(held_entry.view(source))


@final
class _BlockRan(Exception):  # noqa: N818
    """Ends a forward pass after the block that is timed."""


def _block_time(
    network: Network,
    module: nn.Module,
    block_names: Sequence[str],
    call: Call,
    prepare: Callable[[], None] = lambda: None,
) -> float:
    """Seconds that a block takes on the call's own input, with the wait for its weights; the second of two runs.

    Args:
        block_names: the module's first two blocks, of which the second is timed: its weights are converted while the
            first computes, as those of all later ones are. Of a module with one block, that one.
        prepare: called before each run.
    """
    started, seconds = math.nan, math.nan

    def start(*_: object) -> None:
        nonlocal started
        started = time.perf_counter()

    def stop(*_: object) -> None:
        raise _BlockRan

    first, last = (module.get_submodule(name) for name in (block_names[0], block_names[-1]))
    if first is last:
        handles = [first.register_forward_pre_hook(start, prepend=True)]
    else:
        handles = [first.register_forward_hook(start)]
    handles.append(last.register_forward_hook(stop))
    try:
        for _ in range(2):
            prepare()
            try:
                network.run(module, call)
            except _BlockRan:
                seconds = time.perf_counter() - started
    finally:
        for handle in handles:
            handle.remove()
    return seconds


@contextmanager
def _threads(num_ranks: int) -> Iterator[None]:
    """Lets torch use this rank's share of the cores; a launcher of several processes sets one thread for each."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // num_ranks, 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)
