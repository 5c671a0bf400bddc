"""From the recipe's `teacher.placement` to a teacher."""

from __future__ import annotations

from distiller.teachers import PLACEMENTS
from distiller.teachers.base import Network, Setup, Teacher


def open_teacher(network: Network, setup: Setup) -> Teacher:
    """Loads the teacher into its place. Communicates. Raises UserError before any weight is read."""
    return PLACEMENTS[setup.options.placement](network, setup)
