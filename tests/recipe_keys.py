"""Writes docs/recipe.md from distiller/config/: `python -m tests.recipe_keys`, after every change of a key."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from distiller.config.loading import RECIPES
from distiller.storage.yaml_files import dump_yaml

PAGE = Path(__file__).parents[1] / "docs" / "recipe.md"
HEAD = """# Every key of a recipe

Written from `distiller/config/` by `python -m tests.recipe_keys`; a test keeps it true.

A recipe is a YAML file. Every key can be set on the command line as well: `optim.lr=1e-4`, `train.max_steps=500`,
`task.guidance.scale="[3, 7]"`, `student.config=null`; the value is read as YAML. A key that does not exist is an error
that names the nearest one. `recipe.yaml` in a run's output folder has every key written out.
"""


def sections(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """The recipe and its sections, in the order of the file, with their dotted paths."""
    yield path, model
    for name, field in model.model_fields.items():
        if is_section(field.annotation):
            yield from sections(field.annotation, f"{path}.{name}".lstrip("."))


def keys() -> set[str]:
    """Dotted paths of every section and key."""
    return {key for kind in RECIPES for key in keys_of(kind)}


def keys_of(kind: str) -> set[str]:
    """Those of one task."""
    return {f"{path}.{name}".lstrip(".") for path, model in sections(RECIPES[kind]) for name in model.model_fields}


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for path, model, kinds in _sections_of_all():
        rows = list(_rows(model))
        if not rows and not path:
            continue
        text = " ".join((model.__doc__ or "").split())
        of_task = "" if len(kinds) == len(RECIPES) else f", of task {' and '.join(kinds)}"
        parts.append(f"## {f'`{path}`' if path else 'Top level'}{of_task}\n\n{text}\n")
        if rows:
            parts.append("| key | value | default | meaning |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _sections_of_all() -> list[tuple[str, type[BaseModel], list[str]]]:
    """Sections with the tasks that have them: first what all have, then each task's own."""
    kinds_of: dict[tuple[str, type[BaseModel]], list[str]] = {}
    models: dict[str, type[BaseModel]] = {}
    for kind, recipe in RECIPES.items():
        for path, model in sections(recipe):
            # The tasks' recipes differ in their sections, not in what stands at the top.
            model = model if path else models.setdefault(path, model)
            kinds_of.setdefault((path, model), []).append(kind)
    ordered = sorted(kinds_of.items(), key=lambda item: len(item[1]) < len(RECIPES))
    return [(path, model, kinds) for (path, model), kinds in ordered]


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _rows(model: type[BaseModel]) -> Iterator[str]:
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        if is_section(field.annotation):
            continue
        described = schema["properties"][name]
        default = "required" if field.is_required() else f"`{yaml_value(field.default)}`"
        # The descriptions speak Python, the readers write YAML.
        meaning = re.sub(r"\bNone\b", "null", described.get("description", "")).replace("False:", "false:")
        yield f"| `{name}` | {_shape(described)} | {default} | {meaning} |"


def yaml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(yaml_value(part) for part in value)}]"
    return dump_yaml(value).removesuffix("...\n").strip()


def _shape(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_shape(option) for option in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{option}`" for option in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema["type"] == "array":
        if "prefixItems" in schema:
            return f"[{', '.join(_shape(part) for part in schema['prefixItems'])}]"
        return f"list of {_shape(schema['items'])}"
    if schema["type"] == "object":
        return f"mapping of text to {_shape(schema['additionalProperties'])}"
    names = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true, false", "null": "null"}
    signs = {"exclusiveMinimum": "> ", "minimum": ">= ", "exclusiveMaximum": "< ", "maximum": "<= "}
    bounds = [f"{sign}{_number(schema[bound])}" for bound, sign in signs.items() if bound in schema]
    return f"{names[schema['type']]} {', '.join(bounds)}".rstrip()


def _number(value: float) -> str:
    return f"2^{math.log2(value):g}" if value > 1e9 else f"{value:g}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
