"""Refuses launches that Accelerate would partly ignore or that distiller does not support, before reading weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import psutil
import torch

from distiller.config.recipe import Recipe
from distiller.errors import UserError
from distiller.launch.compile import check_compile
from distiller.launch.fsdp import FsdpLaunch, check_offload, check_sharding, fsdp_of_file
from distiller.launch.request import OFFLOADED_PARTS, LaunchRequest, deepspeed_settings, read_launch_file

PRECISIONS = ("no", "bf16", "fp16")
KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "FSDP")
KEYS_OF_DEEPSPEED_JSON = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model"),
    "mixed_precision",
)
"""Keys that Accelerate refuses in a launch file which names a DeepSpeed JSON."""
NVME_BYTES_PER_PARAMETER = 16
"""What DeepSpeed may write to disk for one parameter: float32 weight, gradient and AdamW's two moments."""


@final
@dataclass(frozen=True)
class Launch:
    """What is known of a launch from its file alone, and so also in each process that it starts.

    Attributes:
        request: None without a launch file, and in a process that another launcher than Accelerate's started.
        num_processes: of all machines.
        fsdp: FSDP's settings; None without FSDP.
    """

    request: LaunchRequest | None = None
    num_processes: int = 1
    fsdp: FsdpLaunch | None = None

    @property
    def under_deepspeed(self) -> bool:
        """Whether the launch file asks for DeepSpeed."""
        return self.request is not None and self.request.distributed_type == "DEEPSPEED"

    @property
    def mixed_precision(self) -> str:
        """The launch file's."""
        return "no" if self.request is None else self.request.mixed_precision


def read_launch(file: Path) -> Launch:
    """What a launch file asks for, read without a launcher. Raises UserError."""
    request = read_launch_file(file)
    return Launch(request, request.num_processes, fsdp_of_file(file, request.num_processes))


def check_launch(recipe: Recipe, launch: Launch) -> None:
    """All that is refused (UserError) of a launch file and a recipe, whatever machine runs them.

    The one list of these checks: every process of a run calls it, and `train --check` does. What depends on the machine
    (its launcher, its GPUs' precision, libaio, room on a disk) is checked in the processes alone.
    """
    request, fsdp = launch.request, launch.fsdp
    if request is not None:
        check_request(request)
    check_precision(recipe.train.mixed_precision, launch.mixed_precision)
    precisions = possible_precisions(recipe.train.mixed_precision, launch.mixed_precision)
    if request is not None and launch.under_deepspeed:
        check_json_precision(deepspeed_settings(request), precisions)
    if request is not None:
        check_cpu_precision(request, precisions)
    if fsdp is not None:
        check_sharding(fsdp, launch.num_processes, 1 if request is None else request.num_machines)
        check_offload(fsdp, precisions)
    check_compile(recipe, {} if request is None else request.options, _engine_of(launch))


def _engine_of(launch: Launch) -> str:
    """The engine's name without details, such as `fsdp1` and `deepspeed-zero3`; empty for one process and DDP."""
    if launch.fsdp is not None:
        return f"fsdp{launch.fsdp.version}"
    if launch.request is None or not launch.under_deepspeed:
        return ""
    return f"deepspeed-zero{deepspeed_settings(launch.request)['zero_optimization'].get('stage', 0)}"


def check_request(request: LaunchRequest) -> None:
    """Refuses (UserError) what Accelerate would ignore silently or what distiller does not run."""
    kind, origin, processes, machines = (
        request.distributed_type,
        request.origin,
        request.num_processes,
        request.num_machines,
    )
    if kind not in KINDS:
        raise UserError(f"{origin}: distributed_type {kind} is not supported; use MULTI_GPU, DEEPSPEED or FSDP")
    options = request.options
    is_parallel = options.get("use_parallelism_config") or any(n.startswith("parallelism_config_") for n in options)
    # FSDP reads its replicas from there; other keys are refused where FSDP's settings are read.
    if is_parallel and kind != "FSDP":
        raise UserError(
            f"{origin}: parallelism_config is not supported (no tensor, context or sequence parallel student); remove "
            "it, and choose MULTI_GPU, DEEPSPEED or FSDP"
        )
    if kind == "DEEPSPEED" and request.use_cpu:
        raise UserError(
            f"{origin}: use_cpu: true makes Accelerate drop DeepSpeed silently; remove it "
            "(the ZeRO files run on a CPU-only machine without it)"
        )
    if kind == "FSDP" and request.use_cpu:
        raise UserError(
            f"{origin}: use_cpu: true makes Accelerate drop FSDP silently; remove it "
            "(the FSDP files run on a CPU-only machine without it)"
        )
    if kind in ("NO", "MULTI_CPU") and processes > 1:
        raise UserError(
            f"{origin}: distributed_type {kind} starts one process{' without mpirun' if kind == 'MULTI_CPU' else ''} "
            f"and num_processes is {processes}; use MULTI_GPU (with use_cpu: true on a CPU, as in cpu_2proc.yaml), or "
            "num_processes: 1"
        )
    if processes % machines:
        raise UserError(
            f"{origin}: {processes} processes cannot be split over {machines} machines evenly; num_processes counts "
            "those of all machines"
        )
    if kind == "DEEPSPEED":
        _check_deepspeed_request(request)


def check_gpus(local_processes: int) -> None:
    """Refuses (UserError) more processes on a machine with GPUs than it has of them."""
    if torch.cuda.is_available() and local_processes > torch.cuda.device_count():
        raise UserError(
            f"{local_processes} processes were started on this machine, which has {torch.cuda.device_count()} GPUs; "
            "pass --num_processes or choose another launch file"
        )


def check_launcher() -> None:
    """Refuses (UserError) DeepSpeed's own launcher, which Accelerate starts for pdsh and the like."""
    try:
        command = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return
    if any(word.startswith("deepspeed.launcher") or word.endswith("deepspeed/launcher/launch.py") for word in command):
        raise UserError(
            "DeepSpeed's own launcher is not supported; set deepspeed_multinode_launcher: standard and start each "
            "machine with accelerate launch"
        )


def check_precision(wanted: str, asked: str) -> None:
    """Refuses (UserError) a recipe's precision `wanted` that contradicts the one `asked` for by the launch file."""
    if asked not in PRECISIONS:
        raise UserError(f"mixed_precision {asked} of the launch file is not supported; choose no, bf16 or fp16")
    if asked != "no" and wanted not in ("auto", asked):
        raise UserError(
            f"train.mixed_precision is {wanted} and the launch file says {asked}; remove it from one of the two"
        )


def possible_precisions(wanted: str, asked: str) -> tuple[str, ...]:
    """What a recipe's precision may resolve to: `auto` is the launch file's, else bf16 on a GPU that has it, or no."""
    if wanted != "auto":
        return (wanted,)
    return ("bf16", "no") if asked == "no" else (asked,)


def check_cpu_precision(request: LaunchRequest, precisions: tuple[str, ...]) -> None:
    """Refuses (UserError) fp16 where the launch file keeps the run on the CPU."""
    if precisions == ("fp16",) and request.use_cpu:
        raise UserError(f"train.mixed_precision is fp16, which needs a GPU, and {request.origin} says use_cpu: true")


def check_json_precision(settings: Mapping[str, Any], precisions: tuple[str, ...]) -> None:
    """Refuses (UserError) a DeepSpeed JSON whose own precision is none that the run may have."""
    for name in ("bf16", "fp16"):
        enabled = settings.get(name, {}).get("enabled", "auto")
        if enabled is True and name not in precisions:
            raise UserError(
                f"the DeepSpeed JSON enables {name} and the recipe's precision is {' or '.join(precisions)}; write "
                '"auto" there'
            )
        if enabled is False and precisions == (name,):
            raise UserError(f'the DeepSpeed JSON disables {name}, which the recipe asks for; write "auto" there')


def _check_deepspeed_request(request: LaunchRequest) -> None:
    options, origin = request.options, request.origin
    launcher = options.get("deepspeed_multinode_launcher") or "pdsh"
    if request.num_machines > 1 and launcher != "standard":
        raise UserError(
            f"{origin}: deepspeed_multinode_launcher {launcher} is not supported (without the key it is pdsh); set it "
            "to standard and start each machine with accelerate launch"
        )
    if options.get("deepspeed_moe_layer_cls_names"):
        raise UserError(f"{origin}: deepspeed_moe_layer_cls_names: students here have no experts; remove it")
    if "deepspeed_config_file" in options:
        conflicting = sorted(request.file_keys & set(KEYS_OF_DEEPSPEED_JSON))
        if conflicting:
            raise UserError(
                f"{origin}: {', '.join(conflicting)} beside deepspeed_config_file is refused by Accelerate; remove it "
                "from the launch file (precision, accumulation and clipping are the recipe's, the rest is the JSON's)"
            )
    zero = deepspeed_settings(request).get("zero_optimization", {})
    fill_nvme_paths(zero, options)
    check_zero(zero)


def fill_nvme_paths(zero: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Fills in the launcher's NVMe folders where the settings have none; one flag is used for both parts.

    Accelerate parses these options and ignores them: weights would be written to a folder called `none`.
    """
    given = {part: options.get(f"{part}_nvme_path") for part in OFFLOADED_PARTS}
    for part, other in zip(OFFLOADED_PARTS, reversed(OFFLOADED_PARTS), strict=True):
        offload = zero.get(part) or {}
        if offload.get("device") == "nvme" and offload.get("nvme_path") in (None, "auto", "none"):
            offload["nvme_path"] = given[part] or given[other]


def check_zero(zero: Mapping[str, Any]) -> None:
    """Refuses (UserError) ZeRO settings that DeepSpeed does not have, or would silently replace."""
    stage = zero.get("stage", 0)
    if stage not in (1, 2, 3):
        raise UserError(
            f"the launch file asks for DeepSpeed without ZeRO (stage {stage}); use ddp.yaml, or stage 1 to 3"
        )
    for part in OFFLOADED_PARTS:
        offload = zero.get(part) or {}
        if offload.get("device") != "nvme":
            continue
        if stage < 3:
            raise UserError(
                f"the launch file asks for {part} to nvme under ZeRO-{stage}: only ZeRO-3 has it (DeepSpeed would "
                "quietly use host memory); use zero3_nvme.yaml, or cpu"
            )
        path = offload.get("nvme_path")
        if path in (None, "auto", "none"):
            raise UserError(
                f"{part} to nvme needs a folder on a local disk: pass --{part}_nvme_path FOLDER to accelerate launch "
                "(one flag does for weights and optimizer), or write nvme_path into the launch file"
            )
        _check_folder(part, Path(str(path)).expanduser())


def check_nvme_room(zero: Mapping[str, Any], num_parameters: int, local_share: float) -> None:
    """Refuses (UserError) a disk with too little room for this machine's share of the student's state."""
    for part in OFFLOADED_PARTS:
        offload = zero.get(part) or {}
        if offload.get("device") != "nvme":
            continue
        needed = int(num_parameters * local_share * NVME_BYTES_PER_PARAMETER)
        free = shutil.disk_usage(str(offload["nvme_path"])).free
        if needed > free:
            raise UserError(
                f"{part}_nvme_path: {offload['nvme_path']} has {free / 2**30:.2f} GiB free and the student's state "
                f"takes up to {needed / 2**30:.2f} GiB; give a folder on a larger disk"
            )


def _check_folder(part: str, folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{part}_nvme_path: {folder} is not a folder; make it, on a local disk")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{part}_nvme_path: {folder} cannot be written to; give a folder on a local disk")
