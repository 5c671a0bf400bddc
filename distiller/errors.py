"""The two ways in which a run ends early, and the exit codes they become."""

from __future__ import annotations


class UserError(ValueError):
    """Wrong use: the message is one line that says what was given, which rule it breaks and what to change.

    The command line prints it on rank 0 and exits with 2; it is raised before any weight is read.
    """


class RunError(RuntimeError):
    """The run was set up correctly and failed while running. One line; the command line exits with 1."""


class QualityGateError(RunError):
    """A figure that the recipe demands was not reached. The command line exits with 3."""
