"""Reduces a config to some of its layers, including the values that it lists for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def keep_layers(config: Any, kept: Sequence[int], num_layers: int) -> None:
    """Changes a config of `num_layers` layers in place: keeps the layers with the indices `kept`, in that order."""
    values = config.to_dict()
    for key, value in values.items():
        if isinstance(value, list) and len(value) == num_layers and "layer" in key:
            setattr(config, key, [value[index] for index in kept])
    config.num_hidden_layers = len(kept)
    if isinstance(num_dense := values.get("first_k_dense_replace"), int):
        # The first layers are dense, the others mixtures of experts.
        config.first_k_dense_replace = sum(index < num_dense for index in kept)
    if own_configs := values.get("per_layer_config"):
        # By index, and only for the layers that differ from the rest.
        by_index = {int(index): value for index, value in own_configs.items()}
        config.per_layer_config = {i: by_index[index] for i, index in enumerate(kept) if index in by_index}
