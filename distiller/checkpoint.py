"""Resume state: complete under `checkpoints/step-N`, or absent.

    model.safetensors, optimizer.pt     student and AdamW; read with `weights_only`, so no code is run
    engine/                             both, under DeepSpeed: its own format
    average.safetensors, scaler.json    where the run has a moving average, a loss scale
    progress.json                       written last: the step, and what a resumed run must have in common

There is no random state to keep: draws are functions of (seed, epoch, sample id).
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from distiller.errors import RunError, UserError
from distiller.weights import MovingAverage

ENGINE_FOLDER = "engine"
MODEL_FILE, OPTIMIZER_FILE, SCALER_FILE = "model.safetensors", "optimizer.pt", "scaler.json"
PROGRESS_FILE = "progress.json"
AVERAGE_FILE = "average.safetensors"


@dataclass(frozen=True)
class Identity:
    """What decides which samples an update has, and who can read an engine's files."""

    engine: str
    world_size: int
    samples_per_update: int
    num_samples: int
    data_digest: str


class Checkpoints:
    """The checkpoints of one run. The teacher is in none of them: it was never prepared."""

    def __init__(self, run_dir: Path, accelerator: Accelerator, keep: int, identity: Identity) -> None:
        self._folder, self._accelerator, self._keep = run_dir / "checkpoints", accelerator, keep
        self._identity = identity

    def save(
        self,
        step: int,
        student: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: MovingAverage | None,
        skipped_steps: int,
    ) -> None:
        """Writes a checkpoint aside, then renames it; `latest` moves last. Every rank calls it. Communicates."""
        target, partial = self._folder / f"step-{step}", self._folder / f".step-{step}.partial"
        if self._accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self._accelerator.wait_for_everyone()
        self._save_engine(partial, student, optimizer)
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            if average is not None:
                save_file(average.state, partial / AVERAGE_FILE)
            progress = {"step": step, "skipped_steps": skipped_steps, **asdict(self._identity)}
            _write_durably(partial / PROGRESS_FILE, json.dumps(progress))
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            _write_durably(self._folder / "latest", target.name)
            self._remove_old()
        self._accelerator.wait_for_everyone()

    def load(
        self, step: int, student: nn.Module, optimizer: torch.optim.Optimizer, average: MovingAverage | None
    ) -> None:
        """Restores student, optimizer and average from `step-N`; every rank calls it. RunError for damaged files."""
        folder = self._folder / f"step-{step}"
        try:
            self._load_engine(folder, student, optimizer)
            if average is not None and self._accelerator.is_main_process:
                average.load(load_file(folder / AVERAGE_FILE))
        except (OSError, RuntimeError, KeyError, ValueError, pickle.UnpicklingError, SafetensorError) as error:
            raise RunError(
                f"{folder} is not a readable checkpoint ({str(error).splitlines()[0]}); remove that folder to continue "
                "from the one before it"
            ) from error
        self._accelerator.wait_for_everyone()

    def _save_engine(self, folder: Path, student: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        accelerator = self._accelerator
        if accelerator.distributed_type is DistributedType.DEEPSPEED:
            student.save_checkpoint(os.fspath(folder), tag=ENGINE_FOLDER, save_latest=False)
        elif accelerator.is_main_process:
            save_file(accelerator.unwrap_model(student, keep_torch_compile=False).state_dict(), folder / MODEL_FILE)
            torch.save(optimizer.state_dict(), folder / OPTIMIZER_FILE)
            if accelerator.scaler is not None:
                _write_durably(folder / SCALER_FILE, json.dumps(accelerator.scaler.state_dict()))

    def _load_engine(self, folder: Path, student: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        accelerator = self._accelerator
        if accelerator.distributed_type is DistributedType.DEEPSPEED:
            student.load_checkpoint(os.fspath(folder), tag=ENGINE_FOLDER)
            return
        accelerator.unwrap_model(student, keep_torch_compile=False).load_state_dict(load_file(folder / MODEL_FILE))
        optimizer.load_state_dict(torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True))
        if accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(json.loads((folder / SCALER_FILE).read_text(encoding="utf-8")))

    def _remove_old(self) -> None:
        steps = sorted(_complete_steps(self._folder))
        for step in steps[: -self._keep]:
            shutil.rmtree(self._folder / f"step-{step}")


def latest_step(run_dir: Path) -> int:
    """The step of the newest complete checkpoint, 0 if there is none."""
    return max(_complete_steps(run_dir / "checkpoints"), default=0)


def read_progress(run_dir: Path, step: int, identity: Identity) -> int:
    """Checks that a run of this identity can continue from `step-N`, and returns the steps skipped so far.

    Raises:
        UserError: the data, the global batch, or (where the files are the engine's own) engine or world size differ.
    """
    file = run_dir / "checkpoints" / f"step-{step}" / PROGRESS_FILE
    held = json.loads(file.read_text(encoding="utf-8"))
    for name, wanted in asdict(identity).items():
        if held[name] == wanted:
            continue
        is_placement = name in ("engine", "world_size")
        if is_placement and not any(str(e).startswith("deepspeed") for e in (held["engine"], identity.engine)):
            continue
        remedy = {
            "samples_per_update": "set train.samples_per_update to it",
            "engine": "use the launch file that began it",
            "world_size": "DeepSpeed's files are of one world size: pass --num_processes",
        }.get(name, "restore the data, or begin another run")
        raise UserError(f"--resume: {file.parent} has {name} {held[name]} and this run {wanted}; {remedy}")
    return int(held["skipped_steps"])


def _complete_steps(folder: Path) -> list[int]:
    return [int(file.parent.name.removeprefix("step-")) for file in folder.glob(f"step-*/{PROGRESS_FILE}")]


def _write_durably(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
