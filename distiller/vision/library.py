"""Builds and loads image classifiers of transformers, unsharded in every process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageClassification, PretrainedConfig, PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config


def new_model(config: PretrainedConfig) -> PreTrainedModel:
    """A new model of this config in float32, in training mode; on the meta device inside `torch.device("meta")`.

    The config's `dtype` is ignored, since it only says how weights were saved: weights drawn in bfloat16 would have 8
    significant bits. Under ZeRO-3 the model is unsharded too. transformers would shard its parameters while it builds
    them, which the engine does later.
    """
    unset_hf_deepspeed_config()
    # A copy, since the library writes the dtype into the config that it is given.
    config = copy.deepcopy(config)
    # Of a model type with several classes (LeViT) the library looks for the one that is named, also where none is.
    config.architectures = config.architectures or []
    return AutoModelForImageClassification.from_config(config, dtype=torch.float32)


def read_model(folder: Path, config: PretrainedConfig, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A saved model in eval mode, and transformers' loading report (missing, unexpected and mismatched tensors).

    Reads safetensors files only, and never from the network.
    """
    unset_hf_deepspeed_config()
    return AutoModelForImageClassification.from_pretrained(
        folder, config=config, use_safetensors=True, local_files_only=True, output_loading_info=True, **options
    )
