"""The ways in which a run ends early, and the exit codes they become."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class UserError(ValueError):
    """Wrong use: the message is one line that says what was given, which rule it breaks and what to change.

    The command line prints it on rank 0 and exits with 2; it is raised before any weight is read.
    """


class AgreedUserError(UserError):
    """Wrong use that one rank found and told all others; rank 0 alone says it."""


class OwnUserError(UserError):
    """Wrong use that one rank alone can see: it speaks for itself, whatever the others say."""


class RunError(RuntimeError):
    """The run was set up correctly and failed while running. One line; the command line exits with 1."""


class AgreedError(RunError):
    """A failure that every rank raises together; rank 0 alone says it."""


class QualityGateError(RunError):
    """A figure that the recipe demands was not reached. The command line exits with 3."""


class StoppedError(BaseException):
    """A signal asked the process to end. Not an Exception, as KeyboardInterrupt is none: nobody handles it on the way.

    The command line exits with 128 + the signal's number, as shells report it.

    Attributes:
        signal_number: what was received first.
        is_agreed: every rank raises it after the same update, and rank 0 alone says it.
    """

    def __init__(self, message: str, signal_number: int, is_agreed: bool) -> None:
        super().__init__(message)
        self.signal_number, self.is_agreed = signal_number, is_agreed


def shown(value: Any) -> str:
    """A value as it stands in a recipe, cut to a readable length."""
    text = "nothing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The known key that a misspelt one was meant to be; None where none is alike."""
    return next(iter(difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)), None)
