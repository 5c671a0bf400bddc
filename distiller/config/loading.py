"""Recipes as files: YAML in, `key.sub=value` overrides on top, strict validation, and YAML out.

An unknown key is an error that names the nearest valid one; so is a value of the wrong type or outside its range.
Importing this module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from pydantic import BaseModel, ValidationError

from distiller.config.causal_lm import CUTS, LanguageRecipe
from distiller.config.classification import ClassificationRecipe
from distiller.config.diffusion import DiffusionRecipe
from distiller.config.recipe import Recipe
from distiller.config.teacher_kind import check_kind, kind_by_teacher
from distiller.errors import UserError, nearest, shown
from distiller.storage.packaged_files import find_recipe
from distiller.storage.yaml_files import dump_yaml, parse_yaml

NOTHING: Mapping[str, str] = {}
"""No overrides."""

RECIPES: dict[str, type[Recipe]] = {
    "diffusion": DiffusionRecipe,
    "causal_lm": LanguageRecipe,
    "classification": ClassificationRecipe,
}
"""`task.kind` -> what a recipe of that task holds."""

ALTERNATIVES = (
    (("train.gradient_accumulation_steps",), ("train.samples_per_update",)),
    (
        ("student.config",),
        ("student.path",),
        (
            *("student.num_layers", "student.num_attention_heads", "student.ffn_dim", "student.depths"),
            *(f"student.{key}" for key in CUTS),
        ),
    ),
)
"""Alternative settings, each a tuple of keys; a recipe uses one tuple of each group."""


def load(recipe: str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads and validates a recipe.

    Args:
        recipe: the name of a packaged recipe, or the path of a YAML file.
        overrides: `key.sub=value` strings; the value is read as YAML.

    Raises:
        UserError: in one line, for anything that is wrong with the recipe or an override.
    """
    path = find_recipe(recipe)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{recipe}: cannot be read as a UTF-8 text file ({error}); save it as UTF-8") from error
    try:
        data = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{recipe}: is not valid YAML ({error})") from error
    if not isinstance(data, dict):
        raise UserError(f"{recipe}: a recipe is a mapping of keys (optim: and so on), found {shown(data)}")
    given = {_apply(data, override): override for override in overrides}
    _drop_alternatives(data, set(given))
    return parse(data, recipe, given)


def parse(data: Mapping[str, Any], origin: str = "recipe", given: Mapping[str, str] = NOTHING) -> Recipe:
    """Validates a mapping as a recipe of its task. UserError begins with the override or recipe that is wrong.

    Args:
        origin: the name of the recipe.
        given: the overrides in it, by their keys.
    """
    kind = _kind_of(data, origin, given)
    data = _with_kind(data, kind)
    _reject_unknown_keys(RECIPES[kind], RECIPES[kind], data, "", origin, given)
    try:
        return RECIPES[kind].model_validate(data)
    except ValidationError as error:
        key, text = _first_problem(error)
        raise UserError(f"{error_source(origin, given, key, text)}: {text}") from error


def error_source(origin: str, given: Mapping[str, str], key: str, text: str = "") -> str:
    """What a message about a key begins with: the override that caused the error, or else the recipe.

    Args:
        origin: the recipe's name.
        given: the overrides, by their keys.
        key: the wrong key; '' for a contradiction between keys.
        text: the message, which names the keys of a contradiction.
    """
    at_key = [name for name in given if f"{key}.".startswith(f"{name}.")]
    in_text = [name for name in given if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.]*\w)", text)]
    below_key = [name for name in given if key and name.startswith(f"{key}.")]
    found = at_key or in_text or below_key
    return shown(given[found[-1]]) if found else origin


def dump(recipe: Recipe) -> str:
    """The recipe as YAML with every default written out, in the order of this file."""
    return dump_yaml(recipe.model_dump(mode="json"))


def _kind_of(data: Mapping[str, Any], origin: str, given: Mapping[str, str]) -> str:
    """`task.kind`, or where it is left out, the teacher's kind.

    If the teacher does not exist, the first task that accepts all keys of the recipe: its own checks then report the
    path.
    """
    task = data.get("task")
    if not isinstance(task, Mapping) or "kind" not in task:
        found = kind_by_teacher(data.get("teacher"), error_source(origin, given, "teacher.path"))
        return found or next((kind for kind, recipe in RECIPES.items() if _accepts_keys(recipe, data)), "diffusion")
    kind = task["kind"]
    if not isinstance(kind, str) or kind not in RECIPES:
        source = error_source(origin, given, "task.kind")
        raise UserError(f"{source}: task.kind: given {shown(kind)}; it must be {' or '.join(map(repr, RECIPES))}")
    check_kind(kind, data.get("teacher"), error_source(origin, given, "task.kind", "teacher.path"))
    return kind


def _accepts_keys(recipe: type[Recipe], data: Mapping[str, Any]) -> bool:
    try:
        _reject_unknown_keys(recipe, recipe, data, "", "", NOTHING)
    except UserError:
        return False
    return True


def _with_kind(data: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    task = data.get("task", {})
    return {**data, "task": {"kind": kind, **task}} if isinstance(task, Mapping) else data


def _apply(data: dict[str, Any], override: str) -> str:
    """Applies an override to the data, and returns its key."""
    key, separator, text = override.partition("=")
    parts = key.split(".")
    if not separator or not all(parts):
        raise UserError(f"'{override}': an override has the form key.sub=value, for example optim.lr=1e-4")
    try:
        value = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{shown(override)}: the value is not valid YAML ({error})") from error
    node = data
    for depth, part in enumerate(parts[:-1], start=1):
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise UserError(f"'{override}': {'.'.join(parts[:depth])} is {shown(child)} and has no keys below it")
        node = child
    node[parts[-1]] = value
    return key


def _drop_alternatives(data: dict[str, Any], given: Set[str]) -> None:
    """Removes the file's alternatives to an override: `student.num_layers=4` replaces `student.config`."""
    for ways in ALTERNATIVES:
        chosen = [way for way in ways if given.intersection(way)]
        others = [key for way in ways if way not in chosen for key in way] if chosen else []
        for section, _, name in (key.partition(".") for key in others):
            if isinstance(data.get(section), dict):
                data[section].pop(name, None)


def _reject_unknown_keys(
    recipe: type[Recipe],
    model: type[BaseModel],
    data: Mapping[str, Any],
    prefix: str,
    origin: str,
    given: Mapping[str, str],
) -> None:
    for key, value in data.items():
        source = error_source(origin, given, f"{prefix}{key}")
        if key not in model.model_fields:
            raise UserError(f"{source}: unknown key '{prefix}{key}'; {_nearest(recipe, model, str(key), prefix)}")
        section = _section_of(model, key)
        if section is None:
            continue
        if not isinstance(value, Mapping):
            names = ", ".join(section.model_fields)
            raise UserError(f"{source}: {prefix}{key} is a section with keys ({names}), given {shown(value)}")
        _reject_unknown_keys(recipe, section, value, f"{prefix}{key}.", origin, given)


def _section_of(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    annotation = model.model_fields[key].annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _nearest(recipe: type[Recipe], model: type[BaseModel], key: str, prefix: str) -> str:
    here = nearest(key, model.model_fields)
    if here is not None:
        return f"did you mean '{prefix}{here}'?"
    elsewhere = [path for path in _all_keys(recipe) if path.rsplit(".", 1)[-1] == key]
    whole = f"{prefix}{key}"
    others = [kind for kind, other in RECIPES.items() if other is not recipe and _has_key(other, whole)]
    if others:
        of_kind = next(kind for kind, other in RECIPES.items() if other is recipe)
        return f"it is a key of task.kind={' and '.join(others)}, and this recipe's is {of_kind}"
    if elsewhere:
        return f"did you mean {' or '.join(repr(path) for path in elsewhere)}?"
    return f"valid here: {', '.join(prefix + name for name in model.model_fields)}"


def _has_key(recipe: type[Recipe], key: str) -> bool:
    """Whether the recipes of a task have this key, or a section of this name."""
    return any(other == key or other.startswith(f"{key}.") for other in _all_keys(recipe))


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name in model.model_fields:
        section = _section_of(model, name)
        keys += _all_keys(section, f"{prefix}{name}.") if section else [f"{prefix}{name}"]
    return keys


def _first_problem(error: ValidationError) -> tuple[str, str]:
    """The first wrong key, and one line on it: what stands there, and every form that it may have."""
    problems = error.errors(include_url=False)
    place = _place(problems[0])
    # Each member of a union reports its own error; those at the deepest location are the most specific.
    same = [problem for problem in problems if _place(problem)[: len(place)] == place]
    deepest = max(len(problem["loc"]) for problem in same)
    same = [problem for problem in same if len(problem["loc"]) == deepest]
    place, first = _place(same[0]), same[0]
    if first["type"] == "missing" and isinstance(place[-1], str):
        return _dotted(place), f"the key '{_dotted(place)}' is missing; add it"
    if first["type"] == "missing":
        key = _dotted(place[:-1])
        return key, f"{key}: given {shown(first['input'])}, which has too few items"
    if first["type"] == "value_error":
        return _dotted(place), first["msg"].removeprefix("Value error, ")
    rules = dict.fromkeys(_rule(problem) for problem in same)
    key = _dotted(place)
    return key, f"{key}: given {shown(first['input'])}; it must be {' or '.join(rules)}"


_RULES = {
    "bool_type": "true or false",
    "float_type": "a number",
    "int_type": "a whole number",
    "string_pattern_mismatch": "without NUL characters",
    "string_too_short": "at least {min_length} character long",
    "string_type": "text (put it in quotes)",
    "too_long": "a list of at most {max_length}",
    "tuple_type": "a list",
}


def _rule(problem: Mapping[str, Any]) -> str:
    """What the value must be."""
    if problem["type"] == "string_type" and problem["input"] is None:
        return "text, and null is none: give some, or leave the key out"
    rule = _RULES.get(problem["type"])
    return rule.format(**problem.get("ctx", {})) if rule else problem["msg"].removeprefix("Input should be ")


def _place(problem: Mapping[str, Any]) -> tuple[str | int, ...]:
    """The key of the problem, without the names of union members that pydantic adds to it."""
    return tuple(
        part
        for part in problem["loc"]
        if isinstance(part, int) or (part.isidentifier() and part not in ("float", "int", "str", "tuple"))
    )


def _dotted(place: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in place)
