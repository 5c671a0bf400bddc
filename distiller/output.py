"""A run's output folder: whose it is, and how far it has come."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distiller.checkpoint import Identity, latest_step, read_progress
from distiller.config import Recipe
from distiller.errors import UserError
from distiller.folder_lock import hold, refuse_if_running
from distiller.plain_yaml import parse_yaml
from distiller.recipe_file import dump

RECIPE_FILE = "recipe.yaml"
SUMMARY_FILE = "summary.json"
# Where the teacher lives changes no number, and after an out-of-memory it is what a user wants to change.
MAY_CHANGE_ON_RESUME = (
    *("train.max_steps", "train.num_epochs", "train.log_every", "train.num_workers", "optim.max_bad_steps"),
    *("teacher.placement", "teacher.device_map", "teacher.rank", "teacher.micro_batch", "teacher.offload"),
    *("teacher.nvme_path", "teacher.pin_memory", "teacher.ring_blocks", "teacher.resident_blocks"),
    *("teacher.shard_transfers", "teacher.amortise", "teacher.read_threads"),
)
SECTIONS_THAT_MAY_CHANGE_ON_RESUME = ("checkpoint", "evaluation", "tracking", "output_dir", "cache_dir")


@dataclass(frozen=True)
class Claim:
    """What the folder already holds. Finished means that the summary, the last thing a run writes, is there."""

    steps_done: int
    skipped_steps: int
    is_finished: bool


def claim_output_dir(recipe: Recipe, identity: Identity, resume: bool, last_step: int) -> Claim:
    """Makes the folder ours, until this process ends, and says how far it has come. Rank 0 calls it.

    Changes nothing where the run is finished.

    Raises:
        UserError: the folder is another run's, is in use, or cannot be continued by this recipe and launch file.
    """
    folder = Path(recipe.output_dir)
    if os.path.isfile(folder):
        raise UserError(f"output_dir: {folder} is a file; choose a folder with output_dir=...")
    refuse_if_running(folder)
    held = folder / RECIPE_FILE
    summary = folder / SUMMARY_FILE
    done = skipped_steps = 0
    for name in ("checkpoints", "student"):
        if os.path.lexists(folder / name) and not os.path.lexists(held):
            raise UserError(
                f"output_dir: {folder} holds a '{name}' that is not a run's (no {RECIPE_FILE}); choose another "
                "folder with output_dir=..."
            )
    if os.path.isfile(held):
        if not resume:
            raise UserError(
                f"output_dir: {folder} already holds a run; pass --resume to continue it, or choose another folder "
                "with output_dir=..."
            )
        _check_same_recipe(_held_recipe(held), recipe)
        if _steps_of(summary) == last_step:
            return Claim(last_step, 0, is_finished=True)
        done = latest_step(folder)
        if done > last_step:
            raise UserError(
                f"--resume: {folder} has done {done} steps and the recipe ends after {last_step}; raise "
                "train.max_steps or train.num_epochs"
            )
        if done:
            skipped_steps = read_progress(folder, done, identity)
    if recipe.cache_dir is not None:
        try:
            Path(recipe.cache_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cache_dir: {recipe.cache_dir} cannot be made a folder ({error.strerror})") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        hold(folder)
        temporary = held.with_suffix(".tmp")
        temporary.write_text(dump(recipe), encoding="utf-8")
        temporary.replace(held)
    except OSError as error:
        raise UserError(f"output_dir: {folder} cannot be written ({error.strerror})") from error
    return Claim(done, skipped_steps, is_finished=False)


def _steps_of(summary: Path) -> int:
    try:
        return int(json.loads(summary.read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _held_recipe(file: Path) -> dict[str, Any]:
    try:
        held = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--resume: {file} is damaged ({error}); choose another output_dir") from error
    if not isinstance(held, dict):
        raise UserError(f"--resume: {file} is not a recipe; choose another output_dir")
    return held


def _check_same_recipe(held: dict[str, Any], recipe: Recipe) -> None:
    mine = _flat(json.loads(recipe.model_dump_json()))
    theirs = _flat(held)
    changed = [
        f"{key} was {theirs.get(key)} and is {mine.get(key)} now"
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key) != theirs.get(key)
        and key not in MAY_CHANGE_ON_RESUME
        and key.split(".")[0] not in SECTIONS_THAT_MAY_CHANGE_ON_RESUME
    ]
    if changed:
        raise UserError(
            f"--resume: {'; '.join(changed)} (was: in {recipe.output_dir}); only {', '.join(MAY_CHANGE_ON_RESUME)} and "
            f"the sections {', '.join(SECTIONS_THAT_MAY_CHANGE_ON_RESUME)} may change"
        )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves
