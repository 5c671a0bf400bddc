"""The metrics of a run: metrics.jsonl, Accelerate's trackers and the progress bar, on rank 0."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from pathlib import Path
from typing import Any, final

import torch
from accelerate import Accelerator
from tqdm import tqdm

from distiller.config.recipe import Recipe
from distiller.distributed.process import print_to_stderr
from distiller.run_folder.environment import Session
from distiller.run_folder.files import METRICS_FILE
from distiller.storage.line_file import LineFile
from distiller.training.timing import parts_of_update
from distiller.training.trackers import Trackers

PEAK_FLOPS = (
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("4090", 165e12),
    ("V100", 125e12),
)
"""Words of a GPU's name, and its dense 16-bit peak in FLOP/s, from the vendors' data sheets; the first match counts."""
GIB = 2**30
NOTABLE_SHARE = 0.5
"""Of an update's time, from which on the part that takes it is named beside the progress."""


@final
class Tracker:
    """Writes on rank 0; on other ranks every method does nothing."""

    def __init__(self, recipe: Recipe, accelerator: Accelerator, first_step: int, last_step: int) -> None:
        self._accelerator, self._file = accelerator, LineFile(Path(recipe.output_dir) / METRICS_FILE)
        self._is_terminal, self._last_step = sys.stderr.isatty(), last_step
        self._bar: tqdm[Any] | None = None
        self._trackers, self._first_step = Trackers(accelerator), first_step
        if not accelerator.is_main_process:
            return
        self._file.cut_back(first_step - 1)
        self._bar = tqdm(
            total=last_step,
            initial=first_step - 1,
            desc="train",
            unit="step",
            dynamic_ncols=True,
            # In a log file each redraw would be a line; `log` prints the remaining time instead.
            disable=not self._is_terminal,
        )

    def start_trackers(self, recipe: Recipe, environment: Session | None = None) -> None:
        """Opens the trackers that the recipe names; they continue the series of earlier sessions.

        `environment`: where this session runs, for their configuration.
        """
        if recipe.tracking.trackers:
            self._trackers.start(recipe, self._first_step, environment)

    def advance(self) -> None:
        """Moves the bar by one step."""
        if self._bar is not None:
            # The terminal may be gone.
            with contextlib.suppress(OSError):
                self._bar.update()

    def log_samples(self, folder: Path, step: int) -> None:
        """Shows the samples in a folder, if there are any, in the trackers; after `log` of that step."""
        if self._bar is not None:
            for file in sorted(folder.glob("samples.*")):
                self._trackers.log_samples(file, step)

    def log(self, metrics: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl, logs it to the trackers and shows the main numbers."""
        if self._bar is None:
            return
        # JSON has no infinity: an fp16 overflow's gradient norm is null.
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in metrics.items()}
        self._file.append(json.dumps(finite, allow_nan=False) + "\n")
        self._trackers.log(finite, metrics["step"])
        shown = f"loss {metrics['loss']:.4g}, {metrics['perf/samples_per_s']:.4g} samples/s"
        if metrics.get("eval/loss") is not None:
            shown += f", held out {metrics['eval/loss']:.4g}"
        part, share = next(iter(parts_of_update(metrics).items()), ("", 0.0))
        if share > NOTABLE_SHARE:
            shown += f", {part} {min(share, 1.0):.0%} of the time"
        if self._is_terminal:
            with contextlib.suppress(OSError):
                self._bar.set_postfix_str(shown)
        else:
            left_s = (self._last_step - metrics["step"]) * metrics["perf/step_ms"] / 1e3
            left = tqdm.format_interval(left_s)
            print_to_stderr(f"step {metrics['step']}/{self._last_step}: {shown}, {left} left")

    def close_bar(self) -> None:
        """Ends the bar's line, so that further output begins a new line."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()

    def close(self) -> None:
        """Closes the bar and the trackers."""
        self.close_bar()
        self._accelerator.end_training()


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Dense 16-bit peak of the GPU's matrix units, FLOP/s, from the vendors' data sheets; None if unknown."""
    if device.type != "cuda" or precision == "no":
        return None
    return _peak_of(torch.cuda.get_device_name(device))


def _peak_of(name: str) -> float | None:
    """See `peak_flops`; `name` as the driver gives it, such as "NVIDIA H100 80GB HBM3" or "Tesla V100-SXM2-16GB"."""
    words = set(re.split(r"[ -]", name))
    return next((value for marks, value in PEAK_FLOPS if words >= set(marks.split())), None)


def metrics_of(run_dir: Path, step: int) -> dict[str, Any]:
    """The line of a step that was logged, of a run's metrics.jsonl."""
    lines = (run_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    return next(line for line in map(json.loads, lines) if line["step"] == step)


def last_metrics(run_dir: Path) -> dict[str, Any]:
    """The newest line of a run's metrics.jsonl; empty where the file is gone or has none."""
    try:
        return json.loads((run_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, IndexError, ValueError):
        return {}
