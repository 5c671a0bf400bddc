"""Toy pipelines, made once for all unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import toy_pictures, toys


@pytest.fixture(scope="session")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Wan 2.1's layout (1 transformer) and Wan 2.2's (2 experts), read-only."""
    folder = tmp_path_factory.mktemp("pipelines")
    return {count: toys.make_pipeline(folder / f"experts-{count}", count) for count in (1, 2)}


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One pipeline of each picture family, read-only."""
    folder = tmp_path_factory.mktemp("pictures")
    return {kind: toy_pictures.make(kind, folder / kind) for kind in toy_pictures.KINDS}


@pytest.fixture
def make_recipe(pipelines, tmp_path):
    """Builds a recipe in tmp_path on a shared pipeline; sections are merged over the toy recipe."""

    def make(num_experts: int = 1, **sections):
        data = toys.recipe(tmp_path, pipelines[num_experts], **sections)
        from distiller.config.loading import parse

        return parse(data)

    return make


@pytest.fixture
def fresh():
    """Lets one test build several Accelerators."""
    from accelerate.state import AcceleratorState, GradientState

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    return reset
