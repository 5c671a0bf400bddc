"""Accelerate's trackers over all sessions of a run: one series for each metric, whose steps never go back."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from accelerate import Accelerator

from distiller.config import Recipe
from distiller.recipe_file import dump

TRACKING_FOLDER = "tracking"
_RUN_FILE = "run.json"


@dataclass(frozen=True)
class TrackedRun:
    """What trackers know of a run from all its sessions so far.

    Attributes:
        id: the same in every session, and another one in every output folder.
        last_step: the last one that may have been handed to them.
    """

    id: str
    last_step: int


def tracked_run(folder: Path, last_step: int) -> TrackedRun:
    """The run in a `tracking` folder, which has now been seen to reach `last_step`. Writes it there.

    A new one, with nothing handed over, where there is none: earlier sessions had no trackers.
    """
    file = folder / _RUN_FILE
    try:
        held = TrackedRun(**json.loads(file.read_text(encoding="utf-8")))
        run = TrackedRun(held.id, max(held.last_step, last_step))
    except (OSError, ValueError, TypeError):
        run = TrackedRun(uuid.uuid4().hex[:12], 0)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(run)) + "\n", encoding="utf-8")
    temporary.replace(file)
    return run


@final
class Trackers:
    """The recipe's trackers, open from `start` on. Rank 0's alone are open.

    TensorBoard is told to drop what lies behind a resumed run's first step, and gets it anew. The others cannot drop
    anything: steps that an earlier session has handed to them are not handed over again.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._last_step = 0

    def start(self, recipe: Recipe, first_step: int, last_logged: int) -> None:
        """Opens the trackers that the recipe names; wandb works offline when there is no key, and asks nothing.

        Args:
            first_step: of this session.
            last_logged: the last step that the session before has logged; 0 where there was none.
        """
        folder = Path(recipe.output_dir) / TRACKING_FOLDER
        run = TrackedRun("", 0)
        if self._accelerator.is_main_process:
            run = tracked_run(folder, last_logged)
        self._last_step = run.last_step
        self._accelerator.init_trackers(recipe.tracking.project, None, options_of(recipe, run, first_step))
        for tracker in self._accelerator.trackers:
            # TensorBoard makes each set of values a run of its own.
            if run.last_step == 0 or tracker.name != "tensorboard":
                tracker.store_init_configuration({"recipe": dump(recipe)})

    def log(self, numbers: dict[str, Any], step: int) -> None:
        """Hands a step's numbers to the trackers that do not have them."""
        for tracker in self._accelerator.trackers:
            if step > self._last_step or tracker.name == "tensorboard":
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
