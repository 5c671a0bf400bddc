"""DeepSpeed's settings: the launch file's JSON, with what is the recipe's written in before `prepare`."""

from __future__ import annotations

import os
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin

from distiller.config import Recipe
from distiller.errors import UserError


def is_deepspeed_launch() -> bool:
    """Whether `accelerate launch` started this process for DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"


def deepspeed_plugin(recipe: Recipe, precision: str, accumulation: int, notices: list[str]) -> DeepSpeedPlugin:
    """The launch file's plugin with the recipe's accumulation, clipping and precision written in. Raises UserError."""
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
    for section, key in (("bf16", "check_grad_overflow"), ("zero_optimization", "compute_grad_norm")):
        # Under DeepSpeed these two find the updates that are not finite, and leave them out.
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


def deepspeed_config(accelerator: Accelerator) -> dict[str, Any]:
    """What DeepSpeed was set up with."""
    return accelerator.state.deepspeed_plugin.deepspeed_config
