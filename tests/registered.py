"""Adds an entry to a registry for one test, with all that a new process makes of it."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest

from distiller.config import loading


def register(patch: pytest.MonkeyPatch, kind: str, registry: dict[str, Any], name: str, entry: Any) -> None:
    """Adds the entry and imports the module of the task's recipe again. `patch` undoes both."""
    patch.setitem(registry, name, entry)
    recipe = loading.RECIPES[kind]
    module = sys.modules[recipe.__module__]
    package, _, attribute = module.__name__.rpartition(".")
    # An import sets the package's attribute, too.
    patch.setattr(sys.modules[package], attribute, module)
    patch.delitem(sys.modules, module.__name__)
    patch.setitem(loading.RECIPES, kind, getattr(import_module(module.__name__), recipe.__name__))
