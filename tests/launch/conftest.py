"""The toy that real launches train, and one process's run of it, made once for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import toys
from tests.launch.launching import CONFIGS, launch


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    """A folder with recipe.yaml: six updates of 8 samples, and a cache of its own."""
    return toys.write_recipe(tmp_path_factory.mktemp("launch"))


@pytest.fixture(scope="session")
def reference(toy) -> Path:
    """The run folder of one process."""
    result = launch(CONFIGS / "cpu.yaml", "train", str(toy / "recipe.yaml"), f"output_dir={toy / 'reference'}")
    assert result.code == 0, result.stderr
    return toy / "reference"
