"""Accelerate's trackers over all sessions of a run: one series for each metric, in which steps only increase."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from accelerate import Accelerator

from distiller.config.loading import dump
from distiller.config.recipe import Recipe
from distiller.distributed.process import print_to_stderr
from distiller.run_folder.environment import Session
from distiller.storage.durable_writes import write_durably
from distiller.storage.yaml_files import dump_yaml
from distiller.training.tracked_samples import log_samples

TRACKING_FOLDER = "tracking"
GROUPED = {
    "loss": "loss/total",
    "lr": "optim/lr",
    "grad_norm": "optim/grad_norm",
    "epoch": "progress/epoch",
    "samples": "progress/samples",
    "eval/loss": "eval/loss/total",
}
"""Names in metrics.jsonl, where they stay short -> names in trackers, which draw a group for each first word."""
_RUN_FILE = "run.json"


@final
@dataclass(frozen=True)
class TrackedRun:
    """A run's identity in its trackers, and what earlier sessions have logged.

    Attributes:
        id: the same in every session, and unique for each output folder. A folder that was copied, moved or mounted
            under another path gets a new id: these cases cannot be told apart, and two runs with one id would write
            into each other's series.
        folder: the resolved path of the `tracking` folder that the id belongs to.
        last_steps: tracker name -> the last step that may have been logged to it.
    """

    id: str
    folder: str
    last_steps: dict[str, int]

    def with_step(self, trackers: Iterable[str], step: int) -> TrackedRun:
        """A copy after these trackers have logged a step."""
        steps = {name: max(step, self.last_steps.get(name, 0)) for name in trackers}
        return replace(self, last_steps=self.last_steps | steps)

    def write(self) -> None:
        """Writes run.json into its folder, which is made."""
        folder = Path(self.folder)
        content = {"id": self.id, "folder": self.folder, "handed": self.last_steps}
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / _RUN_FILE, json.dumps(content) + "\n")


def tracked_run(folder: Path) -> TrackedRun:
    """The run of a `tracking` folder; a new one, which is written, where the folder has none or another folder's."""
    resolved, last_steps = str(folder.resolve()), {}
    try:
        content = json.loads((folder / _RUN_FILE).read_text(encoding="utf-8"))
        stored = TrackedRun(content["id"], content["folder"], dict(content["handed"]))
        if stored.folder == resolved:
            return stored
        # TensorBoard's files were copied with the folder, and are continued.
        last_steps = {name: step for name, step in stored.last_steps.items() if name == "tensorboard"}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    run = TrackedRun(uuid.uuid4().hex[:12], resolved, last_steps)
    run.write()
    return run


@final
class Trackers:
    """The recipe's trackers, opened by `start`, on rank 0 only.

    In a resumed run TensorBoard drops the steps from the session's first one on, and logs them again. Other trackers
    cannot drop steps: those that an earlier session has logged are not logged again.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._run = TrackedRun("", "", {})
        self._has_warned = False

    def start(self, recipe: Recipe, first_step: int, environment: Session | None = None) -> None:
        """Opens the trackers that the recipe names; wandb works offline when there is no key, and asks nothing.

        `first_step` and `environment` are this session's.
        """
        if self._accelerator.is_main_process:
            self._run = tracked_run(Path(recipe.output_dir) / TRACKING_FOLDER)
        configuration = {"recipe": dump(recipe)}
        if environment is not None:
            # As text, like the recipe: TensorBoard takes no mappings.
            configuration["environment"] = dump_yaml(environment)
        self._accelerator.init_trackers(recipe.tracking.project, None, options_of(recipe, self._run, first_step))
        for tracker in self._accelerator.trackers:
            # TensorBoard would show each further configuration as a new run.
            if tracker.name != "tensorboard" or tracker.name not in self._run.last_steps:
                tracker.store_init_configuration(configuration)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Logs a step to the trackers that do not have it; where a disk is full, says so once.

        `metrics` are by their names in metrics.jsonl; None is left out.
        """
        receivers = self._receivers(step)
        if not receivers:
            return
        # Written first: if the session dies in between, a tracker misses a step; it would refuse one that comes twice.
        self._run = self._run.with_step([tracker.name for tracker in receivers], step)
        numbers = {grouped_name(name): value for name, value in metrics.items() if value is not None and name != "step"}
        with self._disk_errors_said():
            self._run.write()
            for tracker in receivers:
                tracker.log(numbers, step=step)

    def log_samples(self, file: Path, step: int) -> None:
        """Logs a file of samples of the step that was logged last, a picture or text; errors as in `log`."""
        with self._disk_errors_said():
            # The step's numbers have been logged, or an earlier session has logged all of it.
            for tracker in self._receivers(step + 1):
                log_samples(tracker, file, step)

    def _receivers(self, step: int) -> list[Any]:
        """The trackers that do not have a step yet."""
        return [
            tracker
            for tracker in self._accelerator.trackers
            if step > self._run.last_steps.get(tracker.name, 0) or tracker.name == "tensorboard"
        ]

    @contextmanager
    def _disk_errors_said(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                what = f"{self._run.folder}: {error.strerror or error}; trackers miss steps, training goes on"
                print_to_stderr(f"distiller: {what}")


def grouped_name(name: str) -> str:
    """A metric's name in trackers, which show together what has the same word before the first `/`."""
    if name.startswith("memory/teacher_"):
        return f"teacher/memory_{name.removeprefix('memory/teacher_')}"
    if name.startswith("perf/teacher_"):
        return f"teacher/{name.removeprefix('perf/teacher_')}"
    return GROUPED.get(name, name)


def options_of(recipe: Recipe, run: TrackedRun, first_step: int) -> dict[str, dict[str, Any]]:
    """Tracker name -> options with which it continues the series of the run's earlier sessions."""
    tracking = recipe.tracking
    mode = tracking.mode
    if mode == "auto":
        mode = "online" if _has_wandb_key() else "offline"
    wandb = {
        "mode": mode,
        "dir": str(Path(recipe.output_dir) / TRACKING_FOLDER),
        "name": tracking.run_name,
        "group": run.id,
    }
    if mode == "online":
        # `wandb sync` of two offline pieces with one id would replace the first by the second.
        wandb |= {"id": run.id, "resume": "allow"}
    name = f"{tracking.run_name or Path(recipe.output_dir).resolve().name}-{run.id}"
    options = {
        "wandb": wandb,
        "tensorboard": {"purge_step": first_step},
        "trackio": {"name": name, "group": run.id, "resume": "allow"},
    }
    return {tracker: options[tracker] for tracker in tracking.trackers}


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return netrc.is_file() and "wandb" in netrc.read_text(encoding="utf-8", errors="ignore")
