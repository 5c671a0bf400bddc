"""Dropout is removed from a student's config: its masks would differ between micro-batches, ranks and engines."""

from __future__ import annotations

from transformers import PretrainedConfig


def remove_dropout(config: PretrainedConfig) -> tuple[str, ...]:
    """Sets every dropout rate of a config, and of the configs inside it, to 0; returns the keys that it changed.

    By the names of keys, since much of it is no `nn.Dropout`: rates of attention, of whole paths (`drop_path_rate`). A
    key of a config inside has that one's key before it, as in `text_config.attention_dropout`.
    """
    changed: list[str] = []
    for key, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            changed += [f"{key}.{inner}" for inner in remove_dropout(value)]
        elif "drop" in key and _is_rate(value):
            # In the rate's own type: configs check what is assigned to their keys.
            setattr(config, key, type(value)(0))
            changed.append(key)
        elif "drop" in key and isinstance(value, list | tuple) and any(map(_is_rate, value)):
            setattr(config, key, type(value)(type(rate)(0) if _is_rate(rate) else rate for rate in value))
            changed.append(key)
    return tuple(changed)


def _is_rate(value: object) -> bool:
    """Whether it is a number above 0; True, which is a number too, is a switch."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
