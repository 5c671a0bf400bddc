"""What a config says of each of its layers, for a model that keeps some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def keep_layers(config: Any, kept: Sequence[int], num_layers: int) -> None:
    """Changes a config of `num_layers` layers into one of those with the numbers `kept`, in that order."""
    values = config.to_dict()
    for key, value in values.items():
        if isinstance(value, list) and len(value) == num_layers and "layer" in key:
            setattr(config, key, [value[number] for number in kept])
    config.num_hidden_layers = len(kept)
    if own := values.get("per_layer_config"):
        # Only of the layers that differ from the rest, by their numbers.
        numbered = {int(number): value for number, value in own.items()}
        config.per_layer_config = {place: numbered[number] for place, number in enumerate(kept) if number in numbered}
