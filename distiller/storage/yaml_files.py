"""YAML with the plain scalars of version 1.2, in which a key may not stand twice in a mapping.

PyYAML follows version 1.1, in which `1e-4` is text, `no` is false, `010` is 8 and `1:30` is 90.
"""

from __future__ import annotations

import re
from typing import Any, final

import yaml

_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "merge": r"<<",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}


def parse_yaml(text: str) -> Any:
    """Reads one document of plain data. Raises ValueError with the place and the reason in one line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(place + " ".join(filter(None, (error.context, error.problem)))) from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def dump_yaml(data: Any) -> str:
    """Writes plain data, keys in their own order; read the same by `parse_yaml` and by any YAML reader."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def quoted(text: object) -> str:
    """Text as a scalar in double quotes, on one line, whatever is in it."""
    return yaml.safe_dump(str(text), default_style='"', allow_unicode=True, width=float("inf")).strip()


@final
class _Loader(yaml.SafeLoader):
    """Resolves only the scalars above, and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"the key '{key.value}' is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


@final
class _Dumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would read as another type."""


_Loader.yaml_implicit_resolvers = {}
for _name, _pattern in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), None)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
