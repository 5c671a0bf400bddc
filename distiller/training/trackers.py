"""Accelerate's trackers over all sessions of a run: one series for each metric, whose steps never go back."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from accelerate import Accelerator

from distiller.config.loading import dump
from distiller.config.recipe import Recipe
from distiller.storage.durable_writes import write_durably

TRACKING_FOLDER = "tracking"
_RUN_FILE = "run.json"


@dataclass(frozen=True)
class TrackedRun:
    """What trackers know of a run from all its sessions so far.

    Attributes:
        id: the same in every session, and another one in every output folder. A folder that was copied, moved, or is
            mounted under another path is another run's: nobody can tell these apart, and two runs with one id would
            write into each other's series.
        folder: the resolved path of the `tracking` folder that the id belongs to.
        handed: the last step that may have been handed to each tracker, by its name.
    """

    id: str
    folder: str
    handed: dict[str, int]

    def with_step(self, trackers: Iterable[str], step: int) -> TrackedRun:
        """As it is when these trackers get a step's numbers."""
        return replace(self, handed=self.handed | {name: max(step, self.handed.get(name, 0)) for name in trackers})

    def write(self) -> None:
        """Into its folder, which it makes."""
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / _RUN_FILE, json.dumps(asdict(self)) + "\n")


def tracked_run(folder: Path) -> TrackedRun:
    """The run of a `tracking` folder; a new one, written there, where the folder has none of its own."""
    place, handed = str(folder.resolve()), {}
    try:
        held = TrackedRun(**json.loads((folder / _RUN_FILE).read_text(encoding="utf-8")))
        if held.folder == place:
            return held
        # TensorBoard's files were copied with the folder, and go on.
        handed = {name: step for name, step in held.handed.items() if name == "tensorboard"}
    except (OSError, ValueError, TypeError, AttributeError):
        pass
    run = TrackedRun(uuid.uuid4().hex[:12], place, handed)
    run.write()
    return run


@final
class Trackers:
    """The recipe's trackers, open from `start` on. Rank 0's alone are open.

    TensorBoard is told to drop what lies behind a resumed run's first step, and gets it anew. The others cannot drop
    anything: steps that an earlier session has handed to them are not handed over again.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._run = TrackedRun("", "", {})

    def start(self, recipe: Recipe, first_step: int) -> None:
        """Opens the trackers that the recipe names; wandb works offline when there is no key, and asks nothing.

        `first_step` is this session's.
        """
        if self._accelerator.is_main_process:
            self._run = tracked_run(Path(recipe.output_dir) / TRACKING_FOLDER)
        self._accelerator.init_trackers(recipe.tracking.project, None, options_of(recipe, self._run, first_step))
        for tracker in self._accelerator.trackers:
            # TensorBoard makes each set of values a run of its own.
            if tracker.name != "tensorboard" or tracker.name not in self._run.handed:
                tracker.store_init_configuration({"recipe": dump(recipe)})

    def log(self, numbers: dict[str, Any], step: int) -> None:
        """Hands a step's numbers to the trackers that do not have them."""
        takers = [
            tracker
            for tracker in self._accelerator.trackers
            if step > self._run.handed.get(tracker.name, 0) or tracker.name == "tensorboard"
        ]
        if not takers:
            return
        # Before: a session that dies in between leaves a gap, which a tracker takes, and no step twice.
        self._run = self._run.with_step([tracker.name for tracker in takers], step)
        self._run.write()
        for tracker in takers:
            tracker.log(numbers, step=step)


def options_of(recipe: Recipe, run: TrackedRun, first_step: int) -> dict[str, dict[str, Any]]:
    """How each tracker is opened, by its name, so that it takes this session for a part of the run."""
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
