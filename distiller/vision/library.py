"""The `transformers` library's classifiers, built whole in whatever process asks for one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageClassification, PretrainedConfig, PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config


def new_model(config: PretrainedConfig) -> PreTrainedModel:
    """A model of this config in float32, in training mode; on the meta device inside of a context that says so.

    Float32 whatever `dtype` the config has, which says how somebody saved weights: drawn in bfloat16, a student would
    begin on a grid of 8 bits. Whole also under ZeRO-3: the library would cut its parameters up while it builds them,
    which the engine does later.
    """
    unset_hf_deepspeed_config()
    # A copy, since the library writes the dtype into the config that it is given.
    return AutoModelForImageClassification.from_config(copy.deepcopy(config), dtype=torch.float32)


def read_model(folder: Path, config: PretrainedConfig, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A saved model, in eval mode, and what the library found missing, unknown or misshapen. Safetensors only."""
    unset_hf_deepspeed_config()
    return AutoModelForImageClassification.from_pretrained(
        folder, config=config, use_safetensors=True, local_files_only=True, output_loading_info=True, **options
    )
