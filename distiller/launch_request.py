"""What `accelerate launch` was asked for, read from its own command line and launch file.

Accelerate drops some requests without an error (DeepSpeed with `use_cpu`, `MULTI_CPU` without mpirun, N single runs
under torchrun on a CPU machine), so the request is read again here, to be compared with what is there.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from accelerate.commands.config.config_args import ClusterConfig, default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser

from distiller.errors import UserError
from distiller.process import launcher_arguments, world_size


@dataclass(frozen=True)
class LaunchRequest:
    """What `accelerate launch` was asked for; `origin` names the file (or flags) in messages."""

    origin: str
    num_processes: int
    distributed_type: str
    use_cpu: bool
    mixed_precision: str


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
        raise UserError(f"{request.origin}: distributed_type {kind} is not supported; use MULTI_GPU, DEEPSPEED or FSDP")
    if kind == "DEEPSPEED" and request.use_cpu:
        raise UserError(
            f"{request.origin}: use_cpu: true makes Accelerate drop DeepSpeed silently; remove it "
            "(the ZeRO files run on a CPU-only machine without it)"
        )
    if kind == "FSDP" and request.use_cpu:
        raise UserError(
            f"{request.origin}: use_cpu: true makes Accelerate drop FSDP silently; remove it "
            "(the FSDP files run on a CPU-only machine without it)"
        )
