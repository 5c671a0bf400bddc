"""DeepSpeed's settings: the launch file's JSON, with the recipe's values written in before `prepare`."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin

from distiller.config.recipe import Recipe
from distiller.errors import UserError
from distiller.launch.asynchronous_io import check_asynchronous_io
from distiller.launch.checks import check_json_precision, check_zero, fill_nvme_paths
from distiller.launch.operator_locks import clear_operator_locks, extension_folder
from distiller.launch.request import OFFLOADED_PARTS, LaunchRequest
from distiller.storage.swap_folder import SwapFolder


@final
@dataclass(frozen=True)
class Offload:
    """Where the student's optimizer state and parameters are offloaded to: none, cpu or nvme."""

    optimizer: str = "none"
    parameters: str = "none"

    @property
    def is_any(self) -> bool:
        """Whether anything is offloaded."""
        return (self.optimizer, self.parameters) != ("none", "none")

    def is_on(self, device: str) -> bool:
        """Whether anything is offloaded to `device` (cpu or nvme)."""
        return device in (self.optimizer, self.parameters)


def is_deepspeed_launch() -> bool:
    """Whether `accelerate launch` started this process for DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"


def deepspeed_plugin(
    recipe: Recipe, precision: str, accumulation: int, request: LaunchRequest | None, notices: list[str]
) -> DeepSpeedPlugin:
    """The launch file's plugin with the recipe's accumulation, clipping and precision written in. Raises UserError."""
    try:
        plugin = DeepSpeedPlugin()
    except ImportError as error:
        raise UserError(
            "this launch file needs DeepSpeed; install it with: pip install 'distiller[deepspeed]'"
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"the launch file's DeepSpeed settings are refused: {' '.join(str(error).split())}") from error
    clear_operator_locks(extension_folder())
    config = plugin.deepspeed_config
    zero = config.get("zero_optimization", {})
    fill_nvme_paths(zero, {} if request is None else request.options)
    check_zero(zero)
    _resolve_offload(zero, notices)
    for block in ("optimizer", "scheduler"):
        if config.pop(block, None) is not None:
            notices.append(f"the DeepSpeed JSON's '{block}' block is not used: the recipe's optim section is")
    check_json_precision(config, (precision,))
    for section, key in (("bf16", "check_grad_overflow"), ("zero_optimization", "compute_grad_norm")):
        # By these two DeepSpeed detects and skips updates that are not finite.
        if config.get(section, {}).get(key) is False:
            notices.append(f"DeepSpeed's {section}.{key} false is replaced by true: it keeps bad updates out")
            config[section][key] = True
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
    _fill_auto_sizes(zero)
    return plugin


def _resolve_offload(zero: dict[str, Any], notices: list[str]) -> None:
    """Drops an offload that DeepSpeed lacks at this stage (`accelerate config` offers all), and prepares NVMe's."""
    if zero["stage"] < 3 and (zero.get("offload_param") or {}).get("device", "none") != "none":
        notices.append(f"offload_param is ZeRO-3's and is not used under ZeRO-{zero['stage']}")
        del zero["offload_param"]
    devices = [(zero.get(part) or {}).get("device") for part in ("offload_optimizer", "offload_param")]
    if "nvme" in devices:
        check_asynchronous_io("offload to nvme", "zero3_offload.yaml")
        _use_own_folders(zero)


def _use_own_folders(zero: dict[str, Any]) -> None:
    """Replaces NVMe folders by new ones of this process: DeepSpeed's file names are the same in every run."""
    folders: dict[str, str] = {}
    for part in OFFLOADED_PARTS:
        offload = zero.get(part) or {}
        if offload.get("device") != "nvme":
            continue
        parent = str(offload["nvme_path"])
        if parent not in folders:
            folder = SwapFolder(Path(parent).expanduser(), f"{part}_nvme_path")
            # However the run ends; after SIGKILL the next run removes the folder, which nobody locks.
            atexit.register(folder.remove)
            folders[parent] = str(folder.path)
        offload["nvme_path"] = folders[parent]


def _fill_auto_sizes(zero: dict[str, Any]) -> None:
    """Sets sizes that are `auto` to DeepSpeed's defaults.

    Accelerate derives them from `config.hidden_size`, which diffusers' models lack.
    """
    defaults = {
        "reduce_bucket_size": 500_000_000,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 100_000,
    }
    for key, value in defaults.items():
        if zero.get(key) == "auto":
            zero[key] = value


def deepspeed_config(accelerator: Accelerator) -> dict[str, Any]:
    """DeepSpeed's settings, after the recipe's values were written in."""
    return accelerator.state.deepspeed_plugin.deepspeed_config


def offloaded_parts(accelerator: Accelerator) -> Offload:
    """Where DeepSpeed keeps the optimizer's state and the weights."""
    zero = deepspeed_config(accelerator).get("zero_optimization", {})
    optimizer, parameters = ((zero.get(part) or {}).get("device", "none") for part in OFFLOADED_PARTS)
    return Offload(optimizer, parameters)
