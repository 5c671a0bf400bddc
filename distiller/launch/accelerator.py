"""Creates the Accelerator, and with it processes and engine, from the launch file and the recipe."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from accelerate.utils.dataclasses import KwargsHandler

from distiller.config.recipe import Recipe
from distiller.config.sections import flatten
from distiller.distributed.devices import has_bfloat16, set_tf32
from distiller.distributed.process import world_size
from distiller.distributed.rendezvous import choose_interface, exchange_settings
from distiller.errors import UserError
from distiller.launch.checks import Launch, check_gpus, check_launch, check_launcher
from distiller.launch.deepspeed import Offload, deepspeed_config, deepspeed_plugin, is_deepspeed_launch, offloaded_parts
from distiller.launch.fsdp import FsdpLaunch, fsdp_plugin, launched_fsdp, shard_on_cpu
from distiller.launch.rank_agreement import config_to_compare
from distiller.launch.request import LaunchRequest, requested_launch


@final
@dataclass(frozen=True)
class World:
    """A run's processes and engine. Made before any weight is read."""

    accelerator: Accelerator
    engine: str
    mixed_precision: str
    accumulation_steps: int
    offload: Offload
    fsdp: FsdpLaunch | None
    notices: tuple[str, ...]


def open_world(recipe: Recipe, wrap: Callable[[FsdpLaunch], tuple[str, ...]]) -> World:
    """Creates the Accelerator, and with it the process group. Communicates. Raises UserError before any weight is read.

    The recipe's accumulation, clipping and precision are written into Accelerate's plugins here, before `prepare`.

    Args:
        wrap: the student's module classes that FSDP gathers as one unit each.
    """
    check_launcher()
    request, use_deepspeed = requested_launch(), is_deepspeed_launch()
    on_cpu = not torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_CPU", "False").lower() in ("true", "1")
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    notices: list[str] = []
    fsdp = launched_fsdp(on_cpu, local_world_size, notices)
    check_launch(recipe, Launch(request, world_size(), fsdp))
    if request is not None and request.num_processes != world_size():
        raise UserError(
            f"{request.origin} asks for {request.num_processes} processes and {world_size()} run; use MULTI_GPU "
            "with use_cpu: true, as in accelerate_configs/cpu_2proc.yaml"
        )
    if not on_cpu:
        check_gpus(local_world_size)
    if on_cpu and request is not None and request.distributed_type in ("MULTI_GPU", "NO") and not request.use_cpu:
        notices.append(f"{request.origin}: no GPU found, running on the CPU")
    precision = resolve_precision(recipe.train.mixed_precision, on_cpu, request, notices)
    accumulation = resolve_accumulation(recipe, world_size())
    plugin = deepspeed_plugin(recipe, precision, accumulation, request, notices) if use_deepspeed else None
    sharded = None if fsdp is None else fsdp_plugin(fsdp, wrap(fsdp), precision, on_cpu, notices)
    # gloo is named for DeepSpeed and FSDP on the CPU: with cpu=True Accelerate would drop them without an error.
    handlers: list[KwargsHandler] = (
        [InitProcessGroupKwargs(backend="gloo")] if on_cpu and (world_size() > 1 or sharded) else []
    )
    choose_interface()
    exchange_settings(config_to_compare(recipe, {"the precision": precision, **_engine_settings(plugin, fsdp)}))
    accelerator = Accelerator(
        cpu=on_cpu and not use_deepspeed and sharded is None,
        mixed_precision=precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=accumulation, adjust_scheduler=False, sync_with_dataloader=False
        ),
        deepspeed_plugin=plugin,
        fsdp_plugin=sharded,
        step_scheduler_with_optimizer=False,
        log_with=list(recipe.tracking.trackers) or None,
        project_config=ProjectConfiguration(
            project_dir=recipe.output_dir, logging_dir=str(Path(recipe.output_dir) / "tracking")
        ),
        kwargs_handlers=handlers,
    )
    if fsdp is not None and sharded is not None and on_cpu:
        shard_on_cpu(accelerator, fsdp, sharded)
    set_tf32(recipe.train.tf32)
    engine = engine_name(accelerator)
    if accelerator.num_processes != world_size():
        raise UserError(f"{world_size()} processes were launched and each sees {accelerator.num_processes}")
    if use_deepspeed and not engine.startswith("deepspeed"):
        raise UserError("the launch file asks for DeepSpeed and Accelerate dropped it; remove use_cpu / --cpu")
    if fsdp is not None and engine != fsdp.engine:
        raise UserError("the launch file asks for FSDP and Accelerate dropped it; remove use_cpu / --cpu")
    offload = offloaded_parts(accelerator) if use_deepspeed else Offload()
    return World(accelerator, engine, precision, accumulation, offload, fsdp, tuple(notices))


def _engine_settings(plugin: DeepSpeedPlugin | None, fsdp: FsdpLaunch | None) -> dict[str, Any]:
    """The launch file's settings of the engine, without folders of this machine."""
    if plugin is not None:
        zero = flatten({"zero_optimization": plugin.deepspeed_config.get("zero_optimization", {})})
        return {"the engine": "DeepSpeed", **{key: value for key, value in zero.items() if "nvme_path" not in key}}
    if fsdp is not None:
        return {"the engine": "FSDP", **{f"FSDP's {key}": value for key, value in asdict(fsdp).items()}}
    return {"the engine": "DDP"}


def resolve_precision(wanted: str, on_cpu: bool, request: LaunchRequest | None, notices: list[str]) -> str:
    """`auto` becomes the launch file's precision if it names one, else bf16 on a GPU that has it, else `no`."""
    asked = request.mixed_precision if request is not None else "no"
    has_bf16 = not on_cpu and has_bfloat16(torch.device("cuda"))
    precision = asked if wanted == "auto" and asked != "no" else wanted
    if precision == "auto":
        if not on_cpu and not has_bf16:
            notices.append("this GPU has no bfloat16 (compute capability below 8.0): training in float32")
        return "bf16" if has_bf16 else "no"
    if precision == "bf16" and not on_cpu and not has_bf16:
        raise UserError("train.mixed_precision is bf16 and this GPU has no bfloat16; choose fp16 or no")
    if precision == "fp16" and on_cpu:
        raise UserError("train.mixed_precision is fp16, which needs a GPU; choose bf16 or no")
    return precision


def resolve_accumulation(recipe: Recipe, world_size: int) -> int:
    """Micro-batches an update, from the recipe and the number of processes; UserError if it does not divide."""
    train = recipe.train
    if train.samples_per_update is None:
        return train.gradient_accumulation_steps or 1
    per_pass = train.batch_size * world_size
    if train.samples_per_update % per_pass:
        raise UserError(
            f"train.samples_per_update {train.samples_per_update} is not a multiple of train.batch_size "
            f"{train.batch_size} x {world_size} processes = {per_pass}; change one of them"
        )
    return train.samples_per_update // per_pass


def engine_name(accelerator: Accelerator) -> str:
    """single, ddp, fsdp1, fsdp2, or deepspeed-zero1|2|3[-offload], as in summary.json."""
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        zero = deepspeed_config(accelerator).get("zero_optimization", {})
        return f"deepspeed-zero{zero.get('stage', 0)}" + ("-offload" if offloaded_parts(accelerator).is_any else "")
    if accelerator.distributed_type is DistributedType.FSDP:
        return "fsdp2" if accelerator.is_fsdp2 else "fsdp1"
    return "single" if accelerator.num_processes == 1 else "ddp"
