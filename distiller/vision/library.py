"""The `transformers` library's classifiers, built whole in whatever process asks for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForImageClassification, PretrainedConfig, PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config


def new_model(config: PretrainedConfig) -> PreTrainedModel:
    """A model of this config, in training mode; on the meta device inside of a context that says so.

    Whole also under ZeRO-3: the library would cut its parameters up while it builds them, which the engine does later.
    """
    unset_hf_deepspeed_config()
    return AutoModelForImageClassification.from_config(config)


def read_model(folder: Path, config: PretrainedConfig, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A saved model, in eval mode, and what the library found missing, unknown or misshapen. Safetensors only."""
    unset_hf_deepspeed_config()
    return AutoModelForImageClassification.from_pretrained(
        folder, config=config, use_safetensors=True, local_files_only=True, output_loading_info=True, **options
    )
