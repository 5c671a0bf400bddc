"""Values of launch files and of the DeepSpeed JSONs that they name: read in one way, refused in one line."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from accelerate.utils import str_to_bool

from distiller.errors import UserError, shown


def whole_number(value: Any, name: str, least: int = 0, takes_text: bool = True) -> int:
    """Reads a whole number of at least `least`; UserError says that `name` is none.

    Args:
        takes_text: digits in quotes will do, and 1e8, which YAML reads as text; not where a library reads it again.
    """
    number = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and takes_text:
        with suppress(ValueError):
            number = float(value)
    if number is None or (isinstance(number, float) and not number.is_integer()):
        raise UserError(f"{name} is {shown(value)}, which is not a whole number; write it in digits, without quotes")
    if number < least:
        raise UserError(f"{name} is {shown(value)}; it must be at least {least}")
    return int(number)


def amount(value: Any, name: str) -> float:
    """Reads a number; UserError says that `name` is none."""
    try:
        return float(str(value))
    except ValueError as error:
        raise UserError(f"{name} is {shown(value)}, which is not a number; write it in digits") from error


def switch(value: Any, name: str) -> bool:
    """Reads true or false as Accelerate does; UserError says that `name` is neither."""
    try:
        return bool(str_to_bool(str(value)))
    except ValueError as error:
        raise UserError(f"{name} is {shown(value)}; choose true or false") from error


def section(value: Any, name: str, may_be_nothing: bool = True) -> dict[str, Any]:
    """A mapping of keys, {} for nothing where that may stand; UserError says that `name` is none."""
    if value is None and may_be_nothing:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{name} is {shown(value)}, which is not a mapping of keys; write its keys below it")
    return value


def choice(value: Any, name: str, choices: tuple[Any, ...]) -> Any:
    """One of `choices`, true not being 1; UserError lists them."""
    if not any(value == known and type(value) is type(known) for known in choices):
        raise UserError(f"{name} is {shown(value)}; choose one of {', '.join(shown(known) for known in choices)}")
    return value
