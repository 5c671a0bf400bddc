"""JSON files that a user gives: read as an object, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distiller.errors import UserError


def read_json_object(file: Path, name: str, missing: str) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        name: of the file, with which messages begin.
        missing: the whole message for a file that is not there.

    Raises:
        UserError: the file is missing, cannot be read, is no JSON, or holds something else than an object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(missing) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{name} is not readable JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{name} holds {type(content).__name__}, not a JSON object")
    return content
