"""Environment variables and fixtures of all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

# Read by OpenMP and torch at import. Threads that spin while other ranks need the core slow tests down tenfold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    """Resets Accelerate's process-wide singletons after each test."""
    yield
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
