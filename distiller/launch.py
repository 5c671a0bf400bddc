"""What the launch file asked for, what is really here, and the Accelerator that follows from both.

Accelerate drops some requests without an error (DeepSpeed with `use_cpu`, `MULTI_CPU` without mpirun, N single runs
under torchrun on a CPU machine), so the request is read again from the launcher's own command line and compared.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import ClusterConfig, default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)

from distiller.config import Recipe
from distiller.devices import has_bfloat16, set_tf32
from distiller.errors import UserError
from distiller.process import launcher_arguments, world_size

PRECISIONS = ("no", "bf16", "fp16")


@dataclass(frozen=True)
class LaunchRequest:
    """What `accelerate launch` was asked for; `origin` names the file (or flags) in messages."""

    origin: str
    num_processes: int
    distributed_type: str
    use_cpu: bool
    mixed_precision: str


@dataclass(frozen=True)
class World:
    """The processes and engine that a run got. Everything here is known before any weight is read."""

    accelerator: Accelerator
    engine: str
    mixed_precision: str
    accumulation_steps: int
    notices: tuple[str, ...]


def requested_launch() -> LaunchRequest | None:
    """Reads what `accelerate launch` was asked for from the parent process; None under any other launcher."""
    arguments = launcher_arguments()
    if arguments is None:
        return None
    args = launch_command_parser().parse_args(arguments)
    # As in Accelerate: flags win over the file, and --cpu alone ignores a default file.
    flags = {"DEEPSPEED": args.use_deepspeed, "FSDP": args.use_fsdp, "MULTI_GPU": args.multi_gpu}
    flagged = next((kind for kind, is_set in flags.items() if is_set), None)
    file = args.config_file or (default_config_file if os.path.isfile(default_config_file) and not args.cpu else None)
    if file is None:
        processes, precision = args.num_processes or world_size(), args.mixed_precision or "no"
        return LaunchRequest("accelerate launch", processes, flagged or "NO", args.cpu, precision)
    request = read_launch_file(Path(file), args.num_processes)
    return replace(
        request,
        distributed_type=flagged or request.distributed_type,
        use_cpu=args.cpu or request.use_cpu,
        mixed_precision=args.mixed_precision or request.mixed_precision,
    )


def read_launch_file(file: Path, num_processes: int | None = None) -> LaunchRequest:
    """Reads an Accelerate configuration file; `num_processes` of the command line wins over its own."""
    if not os.path.isfile(file):
        raise UserError(f"{file}: no such accelerate config file; `distiller configs` lists the packaged ones")
    try:
        config = _load_config(file)
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"{file}: is not an accelerate config file for here ({error}); `accelerate config` writes one"
        ) from error
    deepspeed_json = (config.deepspeed_config or {}).get("deepspeed_config_file")
    if deepspeed_json is not None:
        _check_deepspeed_json(file, Path(str(deepspeed_json)))
    # YAML 1.1 reads an unquoted NO as false, which Accelerate takes for what was meant.
    kind = "NO" if config.distributed_type is False else str(getattr(config.distributed_type, "value", "NO"))
    # Without num_processes (-1), Accelerate starts one for each device.
    count = num_processes or config.num_processes
    return LaunchRequest(
        origin=file.name,
        num_processes=count if count > 0 else world_size(),
        distributed_type=kind.removeprefix("DistributedType."),
        use_cpu=bool(config.use_cpu),
        mixed_precision=config.mixed_precision or "no",
    )


def _load_config(file: Path) -> ClusterConfig:
    """Reads what Accelerate would, with checks that it leaves out; ValueError and the like say what is wrong."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("it is not a mapping of keys")
    if content.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise ValueError(f"compute_environment is {content['compute_environment']}; only LOCAL_MACHINE is supported")
    config = load_config_from_file(str(file))
    assert isinstance(config, ClusterConfig)
    if not isinstance(config.num_processes, int):
        raise ValueError(f"num_processes is {config.num_processes!r}, which is not a whole number")
    if not isinstance(config.deepspeed_config, dict):
        raise ValueError(f"deepspeed_config is {config.deepspeed_config!r}, which is not a mapping of keys")
    return config


def _check_deepspeed_json(launch_file: Path, file: Path) -> None:
    if not os.path.isfile(file):
        raise UserError(
            f"{launch_file}: deepspeed_config_file {file} does not exist (it is relative to the working directory); "
            "`distiller configs FOLDER` writes launch files with paths that work everywhere"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{launch_file}: deepspeed_config_file {file} is not readable JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{launch_file}: deepspeed_config_file {file} is not a JSON object")


def check_request(request: LaunchRequest) -> None:
    """Refuses (UserError) what Accelerate would ignore silently or what distiller does not run."""
    kind = request.distributed_type
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "FSDP"):
        raise UserError(f"{request.origin}: distributed_type {kind} is not supported; use MULTI_GPU or DEEPSPEED")
    if kind == "FSDP":
        raise UserError(
            f"{request.origin}: distributed_type FSDP is not supported by this version; use MULTI_GPU or DEEPSPEED"
        )
    if kind == "DEEPSPEED" and request.use_cpu:
        raise UserError(
            f"{request.origin}: use_cpu: true makes Accelerate drop DeepSpeed silently; remove it "
            "(the ZeRO files run on a CPU-only machine without it)"
        )


def is_deepspeed_launch() -> bool:
    """Whether `accelerate launch` started this process for DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"


def open_world(recipe: Recipe) -> World:
    """Creates the Accelerator, and with it the process group. Communicates. Raises UserError before any weight is read.

    The recipe's accumulation, clipping and precision are written into Accelerate's plugins here, before `prepare`.
    """
    request = requested_launch()
    if request is not None:
        check_request(request)
        if request.num_processes != world_size():
            raise UserError(
                f"{request.origin} asks for {request.num_processes} processes and {world_size()} run: distributed_type "
                f"{request.distributed_type} starts one without mpirun; use MULTI_GPU with use_cpu: true, as in "
                "accelerate_configs/cpu_2proc.yaml"
            )
    use_deepspeed = is_deepspeed_launch()
    if os.environ.get("ACCELERATE_USE_FSDP", "false") == "true":
        raise UserError("FSDP is not supported by this version; use accelerate_configs/ddp.yaml or zero3_offload.yaml")
    on_cpu = not torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_CPU", "False").lower() in ("true", "1")
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not on_cpu and local_world_size > torch.cuda.device_count():
        raise UserError(
            f"{local_world_size} processes were started on this machine, which has {torch.cuda.device_count()} GPUs; "
            "pass --num_processes or choose another launch file"
        )
    notices: list[str] = []
    if on_cpu and request is not None and request.distributed_type in ("MULTI_GPU", "NO") and not request.use_cpu:
        notices.append(f"{request.origin}: no GPU found, running on the CPU")
    precision = resolve_precision(recipe.train.mixed_precision, on_cpu, request, notices)
    accumulation = resolve_accumulation(recipe, world_size())
    plugin = _deepspeed_plugin(recipe, precision, accumulation, notices) if use_deepspeed else None
    # gloo is named for DeepSpeed on the CPU: with cpu=True Accelerate would drop DeepSpeed without an error.
    handlers = [InitProcessGroupKwargs(backend="gloo")] if on_cpu and world_size() > 1 else []
    accelerator = Accelerator(
        cpu=on_cpu and not use_deepspeed,
        mixed_precision=precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=accumulation, adjust_scheduler=False, sync_with_dataloader=False
        ),
        deepspeed_plugin=plugin,
        step_scheduler_with_optimizer=False,
        log_with=list(recipe.tracking.trackers) or None,
        project_config=ProjectConfiguration(
            project_dir=recipe.output_dir, logging_dir=str(Path(recipe.output_dir) / "tracking")
        ),
        kwargs_handlers=handlers,
    )
    set_tf32(recipe.train.tf32)
    engine = engine_name(accelerator)
    if accelerator.num_processes != world_size():
        raise UserError(f"{world_size()} processes were launched and each sees {accelerator.num_processes}")
    if use_deepspeed and not engine.startswith("deepspeed"):
        raise UserError("the launch file asks for DeepSpeed and Accelerate dropped it; remove use_cpu / --cpu")
    return World(accelerator, engine, precision, accumulation, tuple(notices))


def resolve_precision(wanted: str, on_cpu: bool, request: LaunchRequest | None, notices: list[str]) -> str:
    """`auto` becomes the launch file's precision if it names one, else bf16 on a GPU that has it, else `no`."""
    asked = request.mixed_precision if request is not None else "no"
    check_precision(wanted, asked)
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


def check_precision(wanted: str, asked: str) -> None:
    """Refuses (UserError) a recipe's precision `wanted` that contradicts the one `asked` for by the launch file."""
    if asked not in PRECISIONS:
        raise UserError(f"mixed_precision {asked} of the launch file is not supported; choose no, bf16 or fp16")
    if asked != "no" and wanted not in ("auto", asked):
        raise UserError(
            f"train.mixed_precision is {wanted} and the launch file says {asked}; remove it from one of the two"
        )


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
    """single, ddp, or deepspeed-zero1|2|3[-offload], as in summary.json."""
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        zero = _deepspeed_config(accelerator).get("zero_optimization", {})
        devices = [zero.get(part, {}).get("device", "none") for part in ("offload_optimizer", "offload_param")]
        return f"deepspeed-zero{zero.get('stage', 0)}" + ("-offload" if any(d != "none" for d in devices) else "")
    return "single" if accelerator.num_processes == 1 else "ddp"


def _deepspeed_plugin(recipe: Recipe, precision: str, accumulation: int, notices: list[str]) -> DeepSpeedPlugin:
    try:
        plugin = DeepSpeedPlugin()
    except ImportError as error:
        raise UserError(
            "this launch file needs DeepSpeed; install it with: pip install 'distiller[deepspeed]'"
        ) from error
    except ValueError as error:
        raise UserError(f"the launch file's DeepSpeed settings are refused: {' '.join(str(error).split())}") from error
    config = plugin.deepspeed_config
    if not config.get("zero_optimization", {}).get("stage", 0):
        raise UserError("the launch file asks for DeepSpeed without ZeRO (stage 0); use ddp.yaml, or stage 1 to 3")
    for block in ("optimizer", "scheduler"):
        if config.pop(block, None) is not None:
            notices.append(f"the DeepSpeed JSON's '{block}' block is not used: the recipe's optim section is")
    for name, kind in (("bf16", "bf16"), ("fp16", "fp16")):
        enabled = config.get(name, {}).get("enabled", "auto")
        if enabled != "auto" and bool(enabled) != (precision == kind) and enabled:
            raise UserError(
                f'the DeepSpeed JSON enables {name} and the recipe\'s precision is {precision}; write "auto" there'
            )
        if enabled != "auto" and not enabled and precision == kind:
            raise UserError(f'the DeepSpeed JSON disables {name}, which the recipe asks for; write "auto" there')
    ours = {
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": recipe.optim.max_grad_norm or 0.0,
        "train_micro_batch_size_per_gpu": recipe.train.batch_size,
    }
    for key, value in ours.items():
        theirs = config.get(key, "auto")
        if theirs not in ("auto", value):
            notices.append(f"DeepSpeed's {key} {theirs} is replaced by the recipe's {value}")
        config[key] = value
    config.pop("train_batch_size", None)
    plugin.gradient_accumulation_steps = accumulation
    plugin.gradient_clipping = recipe.optim.max_grad_norm or 0.0
    _fill_auto_sizes(config.get("zero_optimization", {}))
    return plugin


def _fill_auto_sizes(zero: dict[str, Any]) -> None:
    """Accelerate derives these from `config.hidden_size`, which diffusers' models lack; DeepSpeed's own defaults."""
    defaults = {
        "reduce_bucket_size": 500_000_000,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 100_000,
    }
    for key, value in defaults.items():
        if zero.get(key) == "auto":
            zero[key] = value


def _deepspeed_config(accelerator: Accelerator) -> dict[str, Any]:
    return accelerator.state.deepspeed_plugin.deepspeed_config
