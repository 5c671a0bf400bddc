"""The toy that real launches train, and one process's run of it, made once for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from distiller.cli import main
from tests import toys


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    """A folder with recipe.yaml: six updates of 8 samples, and a cache of its own."""
    return toys.write_recipe(tmp_path_factory.mktemp("launch"))


@pytest.fixture(scope="session")
def reference(toy) -> Path:
    """The run folder of one process: this one, which has imported everything."""
    assert main(["train", str(toy / "recipe.yaml"), f"output_dir={toy / 'reference'}"]) == 0
    return toy / "reference"
