"""Parses values of launch files and of DeepSpeed JSONs; UserError in one line for a wrong one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from accelerate.utils import str_to_bool

from distiller.errors import UserError, shown


def whole_number(value: Any, name: str, least: int = 0, takes_text: bool = True) -> int:
    """Reads a whole number of at least `least`; UserError, which names `name`, otherwise.

    Args:
        takes_text: accepts digits in quotes, and 1e8, which YAML reads as text. False where a library reads it too.
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
    """Reads a number; UserError, which names `name`, otherwise."""
    try:
        return float(str(value))
    except ValueError as error:
        raise UserError(f"{name} is {shown(value)}, which is not a number; write it in digits") from error


def switch(value: Any, name: str) -> bool:
    """Reads true or false as Accelerate does; UserError, which names `name`, otherwise."""
    try:
        return bool(str_to_bool(str(value)))
    except ValueError as error:
        raise UserError(f"{name} is {shown(value)}; choose true or false") from error


def section(value: Any, name: str, may_be_none: bool = True) -> dict[str, Any]:
    """Checks for a mapping of keys; {} for None if `may_be_none`; UserError, which names `name`, otherwise."""
    if value is None and may_be_none:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{name} is {shown(value)}, which is not a mapping of keys; write its keys below it")
    return value


def choice(value: Any, name: str, choices: tuple[Any, ...]) -> Any:
    """Returns the value if it is one of `choices` (True is not 1); UserError, which lists them, otherwise."""
    if not any(value == valid and type(value) is type(valid) for valid in choices):
        raise UserError(f"{name} is {shown(value)}; choose one of {', '.join(shown(valid) for valid in choices)}")
    return value
