"""The toy that real launches train, and one process's run of it, made once for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests import toys
from tests.launch.launching import CONFIGS, launch


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    """A folder with recipe.yaml: six updates of 8 samples, and a cache of its own."""
    folder = tmp_path_factory.mktemp("launch")
    pipeline = toys.make_pipeline(folder / "pipeline")
    options = {"cache_dir": str(folder / "cache"), "train": {"max_steps": 6, "batch_size": 8, "log_every": 1}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(toys.recipe(folder, pipeline, **options)))
    return folder


@pytest.fixture(scope="session")
def reference(toy) -> Path:
    """The run folder of one process."""
    result = launch(CONFIGS / "cpu.yaml", "train", str(toy / "recipe.yaml"), f"output_dir={toy / 'reference'}")
    assert result.code == 0, result.stderr
    return toy / "reference"
