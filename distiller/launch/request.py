"""The launch request: what `accelerate launch` was asked for, read from its command line and launch file.

Accelerate drops some requests without an error (DeepSpeed with `use_cpu`, `MULTI_CPU` without mpirun, N single runs
under torchrun on a CPU machine), so the request is read again here and compared with what was started.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import yaml
from accelerate.commands.config.config_args import ClusterConfig, default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser

from distiller.distributed.process import launcher_arguments, world_size
from distiller.errors import UserError, shown
from distiller.launch.keys import SHORT_FORMS, reject_unknown_keys
from distiller.launch.values import amount, choice, section, whole_number


@final
@dataclass(frozen=True)
class LaunchRequest:
    """What `accelerate launch` was asked for; `origin` names the file (or flags) in messages."""

    origin: str
    num_processes: int
    distributed_type: str
    use_cpu: bool
    mixed_precision: str
    num_machines: int = 1
    file_keys: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)
    """The keys of the engine's sections (`zero_stage`, `dynamo_backend` ...), by the names of the launcher's flags."""


SECTIONS = ("deepspeed_config", "dynamo_config", "fsdp_config", "parallelism_config")
NUMBERS = {"num_processes": -1, "num_machines": 1, "machine_rank": 0, "main_process_port": 0}
"""Integer keys and their minimum. With num_processes -1, as without it, Accelerate counts devices."""
TEXTS = ("distributed_type", "gpu_ids", "main_process_ip", "mixed_precision")
SWITCHES = ("use_cpu", "debug", "same_network", "enable_cpu_affinity")
"""Boolean keys; Accelerate takes any text for true."""
OFFLOADED_PARTS = ("offload_optimizer", "offload_param")
OFFLOAD_DEVICES = ("none", "cpu", "nvme")
SIZES = (
    *("allgather_bucket_size", "reduce_bucket_size", "sub_group_size", "stage3_max_live_parameters"),
    *("stage3_max_reuse_distance", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size"),
)
"""ZeRO's integer keys, in elements, which DeepSpeed checks only after all weights were read."""


def requested_launch() -> LaunchRequest | None:
    """Reads what `accelerate launch` was asked for from the parent process; None under any other launcher."""
    arguments = launcher_arguments()
    if arguments is None:
        return None
    args = launch_command_parser().parse_args(arguments)
    # As in Accelerate: flags win over the file, and --cpu alone ignores a default file.
    flags = {
        "DEEPSPEED": args.use_deepspeed,
        "FSDP": args.use_fsdp,
        "MULTI_GPU": args.multi_gpu,
        "MEGATRON_LM": args.use_megatron_lm,
        "XLA": args.tpu,
    }
    flagged = next((kind for kind, is_set in flags.items() if is_set), None)
    file = args.config_file or (default_config_file if os.path.isfile(default_config_file) and not args.cpu else None)
    if file is None:
        processes, precision = args.num_processes or world_size(), args.mixed_precision or "no"
        machines = args.num_machines or 1
        kind = flagged or ("MULTI_GPU" if processes > 1 else "NO")
        return LaunchRequest(
            "accelerate launch", processes, kind, args.cpu, precision, machines, options=_flagged_options(args)
        )
    request = read_launch_file(Path(file), args.num_processes)
    return replace(
        request,
        distributed_type=flagged or request.distributed_type,
        use_cpu=args.cpu or request.use_cpu,
        mixed_precision=args.mixed_precision or request.mixed_precision,
        num_machines=args.num_machines or request.num_machines,
        options={**request.options, **_flagged_options(args)},
    )


def _flagged_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given as flags; Accelerate's parser lists their names as `nondefault`, if there are any."""
    given = vars(args).get("nondefault", set())
    return {name: value for name, value in vars(args).items() if name in given}


def read_launch_file(file: Path, num_processes: int | None = None) -> LaunchRequest:
    """Reads an Accelerate configuration file; `num_processes` of the command line wins over its own."""
    if not os.path.isfile(file):
        raise UserError(f"{file}: no such accelerate config file; `distiller configs` lists the packaged ones")
    try:
        config = _load_config(file)
    except UserError:
        raise
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"{file}: is not an accelerate config file for here ({error}); `accelerate config` writes one"
        ) from error
    options = _section_options(config)
    if (deepspeed_json := options.get("deepspeed_config_file")) is not None:
        read_deepspeed_json(str(file), deepspeed_json)
    kind = "NO" if config.distributed_type is False else str(getattr(config.distributed_type, "value", "NO"))
    # Without num_processes (-1), Accelerate starts one for each device.
    count = num_processes or config.num_processes or -1
    return LaunchRequest(
        origin=file.name,
        num_processes=count if count > 0 else world_size(),
        distributed_type=kind.removeprefix("DistributedType."),
        use_cpu=bool(config.use_cpu),
        mixed_precision=config.mixed_precision or "no",
        num_machines=config.num_machines or 1,
        file_keys=frozenset(options) | ({"mixed_precision"} if config.mixed_precision else set()),
        options=options,
    )


def _section_options(config: ClusterConfig) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name in SECTIONS:
        prefix = SHORT_FORMS.get(name, "")
        named |= {prefix + key.removeprefix(prefix): value for key, value in getattr(config, name).items()}
    return named


def _load_config(file: Path) -> ClusterConfig:
    """Reads what Accelerate would, with checks that it lacks. Raises UserError, ValueError, OSError, YAMLError."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("it is not a mapping of keys")
    if content.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise ValueError(f"compute_environment is {content['compute_environment']}; only LOCAL_MACHINE is supported")
    for name in SECTIONS:
        section(content.get(name), f"{file}: {name}")
    reject_unknown_keys(file, content)
    for name, least in NUMBERS.items():
        if content.get(name) is not None:
            whole_number(content[name], f"{file}: {name}", least, takes_text=False)
    for name in SWITCHES:
        if not isinstance(content.get(name), bool | None):
            raise UserError(f"{file}: {name} is {shown(content[name])}; write true or false, without quotes")
    for name in TEXTS:
        value = content.get(name)
        # YAML 1.1 reads an unquoted no as false, which Accelerate takes for what was meant.
        if not isinstance(value, str | None) and value is not False:
            raise UserError(f"{file}: {name} is {shown(value)}, which is not text; put it in quotes")
    config = load_config_from_file(str(file))
    assert isinstance(config, ClusterConfig)
    return config


def deepspeed_settings(request: LaunchRequest) -> dict[str, Any]:
    """The settings of a DEEPSPEED request: its JSON's, or the launch file's own keys in the JSON's form."""
    options, origin = request.options, request.origin
    file = options.get("deepspeed_config_file")
    if file not in (None, "none"):
        return read_deepspeed_json(origin, file)
    # Accelerate's plugin parses these as numbers, though the recipe's replace them.
    for name, read in (("gradient_accumulation_steps", whole_number), ("gradient_clipping", amount)):
        if options.get(name, "auto") not in ("auto", None):
            read(options[name], f"{origin}: {name}")
    stage = options.get("zero_stage")
    zero: dict[str, Any] = {"stage": 2 if stage is None else whole_number(stage, f"{origin}: zero_stage")}
    for part in OFFLOADED_PARTS:
        zero[part] = {
            "device": choice(_device(options, part), f"{origin}: {part}_device", OFFLOAD_DEVICES),
            "nvme_path": options.get(f"{part}_nvme_path"),
        }
    return {"zero_optimization": zero}


def _device(options: Mapping[str, Any], part: str) -> str:
    return str(options.get(f"{part}_device") or "none").lower()


FORMER_KEYS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
"""Keys of `zero_optimization` that DeepSpeed still translates into others when it starts."""


def read_deepspeed_json(origin: str, path: Any) -> dict[str, Any]:
    """Reads the DeepSpeed JSON that a launch file (or flags) names.

    Raises:
        UserError: there is none, or something in it is no section or no number where one is read.
    """
    file = Path(str(path))
    if not os.path.isfile(file):
        raise UserError(
            f"{origin}: deepspeed_config_file {file} does not exist (it is relative to the working directory); "
            "`distiller configs FOLDER` writes launch files with paths that work everywhere"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{origin}: deepspeed_config_file {file} is not readable JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{origin}: deepspeed_config_file {file} is not a JSON object")
    if config.get("zero_optimization") is None:
        raise UserError(f"{file}: zero_optimization is missing; add it, with a stage of 1 to 3")
    zero = section(config["zero_optimization"], f"{file}: zero_optimization")
    whole_number(zero.get("stage", 0), f"{file}: zero_optimization.stage", takes_text=False)
    for former, now in FORMER_KEYS.items():
        if zero.get(former):
            raise UserError(f"{file}: zero_optimization.{former} is a former name; give {now}, with a device")
    for name in SIZES:
        if zero.get(name, "auto") != "auto":
            whole_number(zero[name], f"{file}: zero_optimization.{name}", takes_text=False)
    for part in OFFLOADED_PARTS:
        name = f"zero_optimization.{part}"
        device = section(zero.get(part), f"{file}: {name}").get("device", "none")
        choice(device, f"{file}: {name}.device", (*OFFLOAD_DEVICES, "auto"))
    for name in ("bf16", "fp16"):
        precision = section(config.get(name, {}), f"{file}: {name}", may_be_none=False)
        enabled = precision.get("enabled", "auto")
        choice(enabled, f"{file}: {name}.enabled", (True, False, "auto"))
    return config
