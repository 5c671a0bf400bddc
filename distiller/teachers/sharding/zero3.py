"""Shards modules by DeepSpeed's ZeRO-3: one engine for each, separate from the student's and from Accelerate."""

# Attributes that the libraries set at run time, which their stubs lack.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from distiller.config.placements.sharded import ShardedOptions
from distiller.launch.asynchronous_io import check_asynchronous_io
from distiller.storage.packaged_files import launch_files_dir
from distiller.storage.swap_folder import SwapFolder
from distiller.teachers.base import Network, Setup
from distiller.teachers.sharding.sharded_modules import ShardedModules, broadcast_units
from distiller.teachers.weights.layout import move_own_buffers
from distiller.teachers.weights.loading import ModulePlan, plan_modules

CONFIG_FILES = {"none": "teacher_zero3.json", "cpu": "teacher_zero3_cpu.json", "nvme": "teacher_zero3_nvme.json"}
"""`teacher.offload` -> the file in `ds_configs/`; `"auto"` in them is filled in from the recipe and the weights."""
PRECISIONS = {
    torch.float32: {},
    torch.bfloat16: {"bf16": {"enabled": True}},
    torch.float16: {"fp16": {"enabled": True}},
}
"""Section that tells `zero.Init` the dtype of its swap buffers; it does not cast parameters."""


@final
class Zero3Modules(ShardedModules):
    """ZeRO-3 over all ranks: every parameter is flattened and partitioned; small ones stay gathered after first use.

    The student's engine is not affected: no `zero.Init` context stays open, Accelerate does not know these engines,
    and `torch.nn.functional.linear` is not patched.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        """Communicates. Raises UserError before any weight is read."""
        import deepspeed

        self._folder: SwapFolder | None = None
        self._swapper: Any = None
        if ShardedOptions.of(setup.options).offload == "nvme":
            self._folder = setup.ranks.all_succeed(lambda: _swap_folder(setup))
        plans = plan_modules(network, setup, is_reader=setup.ranks.is_main)
        self._config = _read_config(plans, setup, self._folder)
        self._engines: list[Any] = []
        for plan in plans:
            self._load(plan, setup)
            # Without a precision section, with which the engine would cast also the parameters that stay in float32.
            self._engines.append(deepspeed.initialize(model=plan.module, config=copy.deepcopy(self._config))[0])
        self.modules = {plan.name: plan.module for plan in plans}

    def release_forward_state(self, name: str) -> None:
        """Does nothing: ZeRO-3 drops the state of a pass when the next one begins."""

    def tensors(self) -> Iterator[Tensor]:
        for module in self.modules.values():
            for parameter in module.parameters():
                yield parameter.data
                yield parameter.ds_tensor.data
            yield from module.buffers()
        if self._swapper is not None:
            yield self._swapper.buffers

    def close(self) -> None:
        for engine in self._engines:
            engine.destroy()
        for module in self.modules.values():
            for parameter in module.parameters():
                # DeepSpeed's caches never drop the modules, so their memory is freed here.
                parameter.data = parameter.data.new_empty(0)
                parameter.ds_tensor.data = parameter.ds_tensor.new_empty(0)
        self._engines.clear()
        self.modules.clear()
        if self._swapper is not None:
            self._swapper.aio_read_handle.free_cpu_locked_tensor(self._swapper.buffers)
            self._swapper = None
        if self._folder is not None:
            self._folder.remove()

    def _load(self, plan: ModulePlan, setup: Setup) -> None:
        for unit, whole in broadcast_units(plan, setup.ranks):
            state: dict[str, Tensor] = {}
            for entry in unit.entries:
                value = entry.view(whole)
                value = nn.Parameter(value, requires_grad=False) if entry.is_parameter else value.clone()
                state |= dict.fromkeys(entry.names, value)
            plan.module.load_state_dict(state, strict=False, assign=True)
            self._partition([value for value in state.values() if isinstance(value, nn.Parameter)], setup)
        move_own_buffers(plan.module, setup.ranks.device)

    def _partition(self, parameters: Sequence[nn.Parameter], setup: Setup) -> None:
        """Partitions parameters; this rank's partitions are kept where `teacher.offload` says."""
        from deepspeed import zero

        config = self._config | PRECISIONS[setup.dtype]
        own = nn.ParameterList(parameter for parameter in parameters if parameter.dtype == setup.dtype)
        init = zero.Init(own, config_dict_or_path=copy.deepcopy(config), param_swapper=self._swapper)
        self._swapper = init.param_swapper
        islands = nn.ParameterList(parameter for parameter in parameters if parameter.dtype != setup.dtype)
        if self._swapper is not None:
            # The swapper's buffers have one dtype, to which parameters of another dtype would be rounded.
            config["zero_optimization"] = config["zero_optimization"] | {"offload_param": {"device": "cpu"}}
        zero.Init(islands, config_dict_or_path=copy.deepcopy(config))


def _read_config(plans: Sequence[ModulePlan], setup: Setup, folder: SwapFolder | None) -> dict[str, Any]:
    """The packaged configuration of the teacher's engine, with each `"auto"` filled in."""
    file = launch_files_dir() / "ds_configs" / CONFIG_FILES[ShardedOptions.of(setup.options).offload]
    config = json.loads(file.read_text(encoding="utf-8"))
    offload = config["zero_optimization"].get("offload_param", {})
    shapes = [entry.shape for plan in plans for unit in plan.units for entry in unit.entries if entry.is_parameter]
    filled = {
        "pin_memory": ShardedOptions.of(setup.options).pin_memory,
        "nvme_path": str(folder.path) if folder is not None else None,
        "buffer_size": max(-(-math.prod(shape) // setup.ranks.world_size) for shape in shapes),
    }
    offload |= {key: filled[key] for key, value in offload.items() if value == "auto"}
    return config


def _swap_folder(setup: Setup) -> SwapFolder:
    check_asynchronous_io("teacher.offload=nvme", "teacher.placement=disk")
    return SwapFolder(Path(ShardedOptions.of(setup.options).nvme_path or "").expanduser())
