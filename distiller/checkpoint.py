"""Resume state: complete under `checkpoints/step-N`, or absent."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn

from distiller.weights import MovingAverage

PROGRESS_FILE = "progress.json"
AVERAGE_FILE = "average.safetensors"


class Checkpoints:
    """The checkpoints of one run. The teacher is in none of them: it was never prepared."""

    def __init__(self, run_dir: Path, accelerator: Accelerator, keep: int) -> None:
        self._folder, self._accelerator, self._keep = run_dir / "checkpoints", accelerator, keep

    def save(self, step: int, student: nn.Module, average: MovingAverage | None) -> None:
        """Writes a checkpoint aside, then renames it; `latest` moves last. Every rank calls it. Communicates."""
        target, partial = self._folder / f"step-{step}", self._folder / f".step-{step}.partial"
        if self._accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self._accelerator.wait_for_everyone()
        self._accelerator.save_state(os.fspath(partial), safe_serialization=True)
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            if average is not None:
                save_file(average.state, partial / AVERAGE_FILE)
            _write_durably(partial / PROGRESS_FILE, json.dumps({"step": step}))
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            _write_durably(self._folder / "latest", target.name)
            self._remove_old()
        self._accelerator.wait_for_everyone()

    def load(self, step: int, student: nn.Module, average: MovingAverage | None) -> None:
        """Restores student, optimizer and average from `step-N`; every rank calls it."""
        folder = self._folder / f"step-{step}"
        self._accelerator.load_state(os.fspath(folder))
        if average is not None and self._accelerator.is_main_process:
            average.load(load_file(folder / AVERAGE_FILE))
        self._accelerator.wait_for_everyone()

    def _remove_old(self) -> None:
        steps = sorted(_complete_steps(self._folder))
        for step in steps[: -self._keep]:
            shutil.rmtree(self._folder / f"step-{step}")


def latest_step(run_dir: Path) -> int:
    """The step of the newest complete checkpoint, 0 if there is none."""
    return max(_complete_steps(run_dir / "checkpoints"), default=0)


def _complete_steps(folder: Path) -> list[int]:
    return [int(file.parent.name.removeprefix("step-")) for file in folder.glob(f"step-*/{PROGRESS_FILE}")]


def _write_durably(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
