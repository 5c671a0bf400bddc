"""Shows a file of samples, teacher and student side by side, in a tracker."""

from __future__ import annotations

import html
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

NAME = "eval/samples"


def log_samples(tracker: Any, file: Path, step: int) -> None:
    """Logs a picture, or text as it is written, as that step's. Raises OSError where the file cannot be read.

    `tracker`: one of Accelerate's.
    """
    if tracker.name == "tensorboard":
        _log_to_tensorboard(tracker, file, step)
        return
    if tracker.name == "wandb":
        import wandb as library
    else:
        import trackio as library  # type: ignore[import-not-found,no-redef]
    types: Any = library
    if file.suffix == ".txt":
        shown = types.Html(f"<pre>{html.escape(file.read_text(encoding='utf-8'))}</pre>")
    else:
        # The file itself: it stays as it is, in this step's folder.
        shown = types.Image(str(file))
    tracker.log({NAME: shown}, step=step)


def _log_to_tensorboard(tracker: Any, file: Path, step: int) -> None:
    if file.suffix == ".txt":
        # It shows Markdown, in which indented lines are shown as they are.
        tracker.log({NAME: textwrap.indent(file.read_text(encoding="utf-8"), "    ", lambda line: True)}, step=step)
        return
    with Image.open(file) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    tracker.log_images({NAME: pixels[None]}, step=step, dataformats="NHWC")
