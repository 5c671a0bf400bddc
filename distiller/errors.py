"""The two ways in which a run ends early, and the exit codes they become."""

from __future__ import annotations

from typing import Any


class UserError(ValueError):
    """Wrong use: the message is one line that says what was given, which rule it breaks and what to change.

    The command line prints it on rank 0 and exits with 2; it is raised before any weight is read.
    """


class RunError(RuntimeError):
    """The run was set up correctly and failed while running. One line; the command line exits with 1."""


class AgreedError(RunError):
    """A failure that every rank raises together; rank 0 alone says it."""


class QualityGateError(RunError):
    """A figure that the recipe demands was not reached. The command line exits with 3."""


def shown(value: Any) -> str:
    """A value as it stands in a recipe, cut to a readable length."""
    text = "nothing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
