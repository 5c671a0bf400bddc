"""What a config says of each of its layers, for a model that keeps some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def keep_layers(config: Any, kept: Sequence[int], num_layers: int) -> None:
    """Changes a config of `num_layers` layers into one of those with the numbers `kept`, in that order."""
    values = config.to_dict()
    for key, value in values.items():
        if isinstance(value, list) and len(value) == num_layers and "layer" in key:
            setattr(config, key, [value[index] for index in kept])
    config.num_hidden_layers = len(kept)
    if own := values.get("per_layer_config"):
        # Only of the layers that differ from the rest, by their numbers.
        numbered = {int(index): value for index, value in own.items()}
        config.per_layer_config = {place: numbered[index] for place, index in enumerate(kept) if index in numbered}
