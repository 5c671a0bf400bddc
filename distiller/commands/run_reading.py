"""A run that a command reads: its recipe, which keys of it may be given anew, and which student is shown."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distiller.checkpoint.format import PROGRESS_FILE, steps_in
from distiller.checkpoint.reading import read_progress_file
from distiller.config.loading import load
from distiller.config.recipe import Recipe
from distiller.config.sections import Section
from distiller.distributed.devices import set_tf32
from distiller.errors import UserError
from distiller.export import export_checkpoint, find_checkpoint
from distiller.run_folder.output_dir import RECIPE_FILE, SUMMARY_FILE
from distiller.tasks.base import Task

_KEYS_OF_BOTH = (
    *("sampling", "teacher", "cache_dir", "train.tf32"),
    *("student.path", "student.config", "data.path", "data.split", "data.image_column", "data.label_column"),
    *("task.height", "task.width", "task.num_frames", "task.max_sequence_length", "task.guidance"),
    *("task.trust_remote_code", "task.channels_last"),
)
ACCEPTED_KEYS = {
    "evaluate": (
        *(*_KEYS_OF_BOTH, "seed", "data.kind", "data.max_samples", "data.max_length", "data.packing", "data.held_out"),
        *("evaluation.judge", "evaluation.num_samples", "evaluation.batch_size", "evaluation.min_recognised"),
        *("evaluation.seeds", "evaluation.features", "evaluation.clip"),
        *("evaluation.batch_tokens", "evaluation.max_rows", "evaluation.min_improvement"),
        *("evaluation.min_accuracy_ratio", "train.num_workers"),
    ),
    "sample": (*_KEYS_OF_BOTH, "evaluation.max_new_tokens"),
    "export": (),
}
"""Command -> the keys, and whole sections, of a run's recipe that may be given anew: those that change its result."""
_ABSENT = object()


@dataclass(frozen=True)
class ReadRun:
    """A run's folder and recipe; `checkpoint` is the one that was named instead of the run, or None."""

    folder: Path
    recipe: Recipe
    checkpoint: Path | None


def open_run(given: Path, command: str, overrides: Sequence[str] = ()) -> ReadRun:
    """Reads the recipe of a run that is named by its folder or by a checkpoint of it. Raises UserError."""
    is_checkpoint = os.path.isfile(given / PROGRESS_FILE)
    if is_checkpoint:
        given = Path(os.path.abspath(given))
    folder = run_folder_of(given) if is_checkpoint else given
    if not os.path.isfile(folder / RECIPE_FILE):
        raise UserError(f"{folder}: is not a run's output folder (it has no {RECIPE_FILE})")
    recipe = load(str(folder / RECIPE_FILE), overrides, is_of_run=True)
    allowed = ACCEPTED_KEYS[command]
    for override in overrides:
        key = override.partition("=")[0]
        if not any(key == one or key.startswith(f"{one}.") for one in allowed):
            raise UserError(
                f"'{override}' changes nothing that {command} does; it may be given {_list_keys(recipe, allowed)}"
            )
    set_tf32(recipe.train.tf32)
    # The run's folder may have been moved: its stages are where it is now.
    return ReadRun(folder, recipe.model_copy(update={"output_dir": str(folder)}), given if is_checkpoint else None)


def run_folder_of(checkpoint: Path) -> Path:
    """The folder of a checkpoint's run: RUN of RUN/checkpoints/step-N as it is written, else where links lead.

    A run's `checkpoints` may be a link to another file system, and a checkpoint may be named by a link elsewhere.
    """
    written = Path(os.path.abspath(checkpoint)).parent.parent
    return written if os.path.isfile(written / RECIPE_FILE) else checkpoint.resolve().parent.parent


@contextmanager
def exported_student(run: ReadRun, task: Task[Any, Any]) -> Iterator[tuple[Path, int | None]]:
    """A folder that holds `student/`: the run's own, or for as long as the block lasts that of a checkpoint.

    Of a run that has no student yet it is the newest checkpoint's, which is said.

    Yields:
        the folder, and the step of the checkpoint; None of a finished run's student.

    Raises:
        UserError: there is neither, or the checkpoint is damaged.
    """
    steps, done = steps_in(run.folder / "checkpoints"), _finished_steps(run.folder)
    if run.checkpoint is None and os.path.isfile(run.folder / "student" / "config.json"):
        if done and steps and steps[-1] > done:
            print(
                f"note: student/ is that of step {done}, where the run ended before it was resumed; for a later one "
                f"give {run.folder}/checkpoints/step-{steps[-1]}"
            )
        yield run.folder, None
        return
    if run.checkpoint is None and not steps:
        raise UserError(f"{run.folder}: has neither student/ nor a checkpoint yet; finish its training first")
    checkpoint = run.checkpoint or find_checkpoint(run.folder)
    if run.checkpoint is None:
        print(
            f"note: {run.folder} has no student/ yet; this is the student of its newest checkpoint, {checkpoint.name}"
        )
    try:
        temporary = tempfile.TemporaryDirectory(dir=run.folder, prefix=".student-")
    except OSError as error:
        raise UserError(
            f"{run.folder}: cannot be written ({error.strerror}), and {checkpoint.name} is exported into it; copy "
            "the run, or `distiller export` it elsewhere"
        ) from error
    with temporary as folder:
        export_checkpoint(task, checkpoint, Path(folder) / "student")
        yield Path(folder), read_progress_file(checkpoint).step


def _finished_steps(folder: Path) -> int:
    try:
        return int(json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _list_keys(recipe: Recipe, allowed: Sequence[str]) -> str:
    """The allowed keys that a recipe of this task has."""
    found = []
    for key in allowed:
        value: Any = recipe
        for part in key.split("."):
            value = getattr(value, part) if isinstance(value, Section) and part in type(value).model_fields else _ABSENT
        if value is not _ABSENT:
            found.append(f"{key}.*" if isinstance(value, Section) else key)
    return ", ".join(found)
