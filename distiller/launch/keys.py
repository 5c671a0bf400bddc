"""The keys that a launch file may have; Accelerate accepts any key below a section, and ignores those unknown to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser

from distiller.errors import UserError, nearest

FLAGS = {
    "deepspeed_config": ("deepspeed_", "zero", "offload_", "gradient_"),
    "dynamo_config": ("dynamo_",),
    "fsdp_config": ("fsdp_",),
    "parallelism_config": ("parallelism_config_",),
}
"""Section -> prefixes of the launcher's flags that are its keys."""
WITHOUT_FLAG = {"fsdp_config": ("fsdp_ignored_modules",)}
"""Section -> keys that the launcher reads from a file only."""
SHORT_FORMS = {"dynamo_config": "dynamo_", "fsdp_config": "fsdp_"}
"""Section -> the prefix that Accelerate adds to keys without it."""
OLDER = ("fp16", "dynamo_backend")
"""Older top-level keys that Accelerate still translates."""


def reject_unknown_keys(file: Path, content: Mapping[Any, Any]) -> None:
    """Refuses (UserError) a key of a launch file that Accelerate does not read, and names the nearest one."""
    sections = _sections()
    top = (*(field.name for field in dataclasses.fields(ClusterConfig)), *OLDER)
    for key in content:
        if key not in top:
            raise UserError(f"{file}: unknown key '{key}'; {_nearest(str(key), top, '', sections, top)}")
    for name, keys in sections.items():
        short = SHORT_FORMS.get(name)
        shorter = () if short is None else tuple(key.removeprefix(short) for key in keys)
        found = content.get(name)
        for key in found if isinstance(found, Mapping) else ():
            if key not in (*keys, *shorter):
                hint = _nearest(str(key), (*keys, *shorter), f"{name}.", sections, top)
                raise UserError(f"{file}: unknown key '{name}.{key}'; {hint}")


def _sections() -> dict[str, tuple[str, ...]]:
    flags = vars(launch_command_parser().parse_args(["script"]))
    return {
        name: (*(flag for flag in flags if flag.startswith(prefixes)), *WITHOUT_FLAG.get(name, ()))
        for name, prefixes in FLAGS.items()
    }


def _nearest(
    key: str, valid: tuple[str, ...], prefix: str, sections: Mapping[str, tuple[str, ...]], top: tuple[str, ...]
) -> str:
    longer = [f"{flag_prefix}{key}" for flag_prefix in FLAGS.get(prefix.removesuffix("."), ())]
    places = [f"{prefix}{name}" for name in longer if name in valid]
    if not places and (here := nearest(key, valid)):
        places = [f"{prefix}{here}"]
    places = places or [f"{name}.{key}" for name, keys in sections.items() if key in keys]
    if not places and key in top:
        return f"'{key}' stands at the top of the file"
    return f"did you mean '{places[0]}'?" if places else f"valid here: {', '.join(sections.get(prefix[:-1], top))}"
