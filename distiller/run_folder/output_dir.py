"""A run's output folder: whether this run may use it, and how many steps it has done."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from distiller.checkpoint.format import Identity
from distiller.checkpoint.resuming import check_resumable, latest_step
from distiller.config.loading import dump
from distiller.config.placements.keys import keys_free_on_resume
from distiller.config.recipe import Recipe
from distiller.config.sections import Section, flatten
from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.run_folder.files import RECIPE_FILE, SUMMARY_FILE
from distiller.run_folder.inputs import INPUTS, absolute_paths, check_same_inputs, with_absolute_paths
from distiller.storage.durable_writes import write_durably
from distiller.storage.folder_lock import lock_folder, refuse_if_running
from distiller.storage.yaml_files import parse_yaml

_VISIBILITY_TIMEOUT_S = 30
# Where the teacher lives and how an update is split change no number, and after an out-of-memory, or on fewer GPUs,
# that is what a user wants to change. The number of samples of an update is compared with the checkpoint's.
_MAY_CHANGE_ON_RESUME = (
    *("train.max_steps", "train.num_epochs", "train.log_every", "train.num_workers", "train.batch_size"),
    *("train.gradient_accumulation_steps", "train.samples_per_update", "train.gradient_checkpointing"),
    # Compared with the checkpoint's, as `auto` has come out.
    *("train.mixed_precision", "teacher.dtype"),
    *("optim.max_bad_steps", "teacher.placement", "teacher.prefetch_steps", "teacher.max_quantization_error"),
    "cache.shard_mib",
    # Other roundings of the same numbers, chosen by `auto` from the run's length.
    *("train.compile", "teacher.compile"),
)
SECTIONS_THAT_MAY_CHANGE_ON_RESUME = ("checkpoint", "evaluation", "tracking", "profile", "output_dir", "cache_dir")


def may_change_on_resume() -> tuple[str, ...]:
    """The keys that a resumed run may change, placements' own among them."""
    return (*_MAY_CHANGE_ON_RESUME, *keys_free_on_resume())


@final
@dataclass(frozen=True)
class Claim:
    """The state of the run's folder. Finished means that the summary, which a run writes last, is there.

    `resumed`: of the run that wrote the checkpoint; None where there is none. `former_length`: which keys said how long
    the run is when it began, where they say something else now.
    """

    steps_done: int
    is_finished: bool
    is_new: bool = False
    resumed: Identity | None = None
    former_length: str | None = None

    def resume_message(self, folder: Path, last_step: int) -> str:
        """One line that says from which step a resumed run continues."""
        if self.is_new:
            return f"warning: --resume: {folder} holds no run (is output_dir right?); this is a new one, from step 1"
        if not self.steps_done:
            return f"warning: --resume: the run in {folder} has no complete checkpoint yet; it starts again at step 1"
        checkpoint = folder / "checkpoints" / f"step-{self.steps_done}"
        if self.steps_done == last_step:
            return f"note: --resume: training has come to its end, {checkpoint}; what follows it is left"
        text = f"note: --resume: continues from {checkpoint}, with step {self.steps_done + 1} of {last_step}"
        if self.former_length is not None:
            text += (
                f"; the run was begun with {self.former_length}: the learning rate follows the new length from now on"
            )
        return text


def check_output_dir(recipe: Recipe, resume: bool, last_step: int) -> bool:
    """Checks whether the folder can be this run's, as far as the recipe alone says. Changes nothing.

    Returns:
        whether the run is finished. Neither inputs nor write access are checked then.

    Raises:
        UserError: it is another run's, is in use, cannot be continued by this recipe, or cannot be written.
    """
    folder = Path(recipe.output_dir)
    if os.path.isfile(folder):
        raise UserError(f"output_dir: {folder} is a file; choose a folder with output_dir=...")
    refuse_if_running(folder)
    recipe_file = folder / RECIPE_FILE
    for name in ("checkpoints", "student"):
        if os.path.lexists(folder / name) and not os.path.lexists(recipe_file):
            raise UserError(
                f"output_dir: {folder} holds a '{name}' that is not a run's (no {RECIPE_FILE}); choose another "
                "folder with output_dir=..."
            )
    if os.path.isfile(recipe_file):
        if not resume:
            raise UserError(
                f"output_dir: {folder} already holds a run; pass --resume to continue it, or choose another folder "
                "with output_dir=..."
            )
        original = _read_recipe(recipe_file)
        _check_same_recipe(original, recipe)
        if is_finished(recipe, last_step):
            return True
        check_same_inputs(folder, flatten(original), recipe)
    # One that is there may be read-only: others have made all the stages, or the stage that is missing says so.
    if recipe.cache_dir is not None and not os.path.isdir(recipe.cache_dir):
        why = _why_not_writable(Path(recipe.cache_dir))
        if why is not None:
            raise UserError(f"cache_dir: {recipe.cache_dir} cannot be made a folder ({why})")
    if (why := _why_not_writable(folder)) is not None:
        raise UserError(f"output_dir: {folder} cannot be written ({why})")
    return False


def claim_output_dir(recipe: Recipe, identity: Identity, resume: bool, last_step: int) -> Claim:
    """Locks the folder until this process ends, and returns its state. Rank 0 calls it.

    Changes nothing where the run is finished.

    Raises:
        UserError: the folder is another run's, is in use, or cannot be continued by this recipe and launch file.
    """
    if check_output_dir(recipe, resume, last_step):
        return Claim(last_step, is_finished=True)
    folder = Path(recipe.output_dir)
    recipe_file = folder / RECIPE_FILE
    done, is_new, resumed, former_length = 0, not os.path.isfile(recipe_file), None, None
    if not is_new:
        done = latest_step(folder)
        if done > last_step:
            raise UserError(
                f"--resume: {folder} has done {done} steps and the recipe ends after {last_step}; raise "
                "train.max_steps or train.num_epochs"
            )
        if done:
            resumed = check_resumable(folder, done, identity).identity
            former_length = _former_length(_read_recipe(recipe_file), recipe)
    if recipe.cache_dir is not None:
        try:
            Path(recipe.cache_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cache_dir: {recipe.cache_dir} cannot be made a folder ({error.strerror})") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_folder(folder)
        write_durably(recipe_file, dump(with_absolute_paths(recipe)))
    except OSError as error:
        raise UserError(f"output_dir: {folder} cannot be written ({error.strerror})") from error
    return Claim(done, is_finished=False, is_new=is_new, resumed=resumed, former_length=former_length)


def is_finished(recipe: Recipe, last_step: int) -> bool:
    """Whether the folder's run has finished, at `last_step`."""
    return _steps_of(Path(recipe.output_dir) / SUMMARY_FILE) == last_step


def is_finished_by_files(recipe: Recipe) -> bool:
    """Whether the folder holds this recipe's finished run, where its teacher or data are gone. Reads only the folder.

    False without `train.max_steps`: the last step depends on the data then. Keys that the recipe leaves to the
    teacher's defaults are not compared. UserError for another run's folder.
    """
    recipe_file = Path(recipe.output_dir) / RECIPE_FILE
    if not recipe.train.max_steps or not is_finished(recipe, recipe.train.max_steps) or not os.path.isfile(recipe_file):
        return False
    _check_same_recipe(_read_recipe(recipe_file), recipe, has_defaults=False)
    return True


def check_shared(folder: Path, ranks: Ranks, key: str = "output_dir") -> None:
    """UserError on every rank if one does not see what rank 0 writes into the folder. Communicates.

    `key` is the folder's recipe key, for messages.
    """
    token = folder / ranks.broadcast_from_main(lambda: _make_token(folder))
    unseen = [rank for rank, sees in enumerate(ranks.gather(_wait_for_file(token))) if not sees]
    if ranks.is_main:
        token.unlink(missing_ok=True)
    if unseen:
        raise UserError(
            f"{key}: {folder} of rank {unseen[0]} is not the folder of rank 0; with several machines it must lie "
            f"on a file system that all of them share: choose one with {key}=..."
        )


def check_shared_stages(recipe: Recipe, is_missing: bool, ranks: Ranks) -> None:
    """`check_shared` of the stages' folder, if a stage will be made in it. Communicates.

    `is_missing` is whether this rank lacks a stage that some ranks make for all.
    """
    if any(ranks.gather(is_missing)) and recipe.cache_dir is not None:
        check_shared(recipe.stages_dir.primary, ranks, "cache_dir")


def _why_not_writable(folder: Path) -> str | None:
    """Why a folder cannot be made or written to, judged by its nearest existing parent; None if it can."""
    ancestor = Path(os.path.abspath(folder))
    while True:
        try:
            is_folder = stat.S_ISDIR(os.stat(ancestor).st_mode)
            break
        except FileNotFoundError:
            ancestor = ancestor.parent
        except OSError as error:
            return error.strerror
    if not is_folder:
        return os.strerror(errno.ENOTDIR)
    return None if os.access(ancestor, os.W_OK | os.X_OK) else f"{ancestor}: {os.strerror(errno.EACCES)}"


def _make_token(folder: Path) -> str:
    name = f".{uuid.uuid4().hex}.token"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    return name


def _wait_for_file(file: Path) -> bool:
    """Waits for a file, which other machines may see late on a network file system; False after 30 s."""
    for _ in range(_VISIBILITY_TIMEOUT_S):
        if file.exists():
            return True
        time.sleep(1)
    return False


def _steps_of(summary: Path) -> int:
    try:
        return int(json.loads(summary.read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _read_recipe(file: Path) -> dict[str, Any]:
    try:
        content = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--resume: {file} is damaged ({error}); choose another output_dir") from error
    if not isinstance(content, dict):
        raise UserError(f"--resume: {file} is not a recipe; choose another output_dir")
    return content


def _is_default(recipe: Recipe, key: str) -> bool:
    """Whether a dotted key of the recipe has its default."""
    section: Any = recipe
    *parents, name = key.split(".")
    for parent in parents:
        section = getattr(section, parent, None)
    field = type(section).model_fields.get(name) if isinstance(section, Section) else None
    if field is None or field.is_required():
        return False
    return getattr(section, name) == field.get_default(call_default_factory=True)


def _former_length(original: dict[str, Any], recipe: Recipe) -> str | None:
    """The keys of the run's length as they were, where they have changed and the learning rate depends on them."""
    before = flatten(original)
    changed = [
        f"train.{name} {before.get(f'train.{name}')}"
        for name in ("max_steps", "num_epochs")
        if before.get(f"train.{name}") != getattr(recipe.train, name)
    ]
    return " and ".join(changed) if changed and recipe.optim.schedule != "constant" else None


def _check_same_recipe(original: dict[str, Any], recipe: Recipe, has_defaults: bool = True) -> None:
    """UserError if a key differs that may not. `has_defaults`: whether the teacher's defaults are filled in."""
    now = flatten(json.loads(with_absolute_paths(recipe).model_dump_json()))
    before = absolute_paths(flatten(original))
    # Inputs are compared by their content.
    free = (*may_change_on_resume(), *(key for keys in INPUTS.values() for key in keys))
    changed = [
        f"{key} was {before.get(key)} and is {now.get(key)} now"
        for key in sorted(now.keys() | before.keys())
        if now.get(key) != before.get(key)
        and (has_defaults or now.get(key) is not None)
        # An older version wrote all of its keys; the default of one that it did not have is what it did.
        and (key in before or not _is_default(recipe, key))
        # A key may hold a mapping, such as a device map, whose entries are keys below it.
        and not any(key == name or key.startswith(f"{name}.") for name in free)
        and key.split(".")[0] not in SECTIONS_THAT_MAY_CHANGE_ON_RESUME
    ]
    was_cached, is_cached = before.get("teacher.placement") == "cached", recipe.teacher.placement == "cached"
    if was_cached != is_cached and not recipe.cache.is_exact:
        raise UserError(
            "--resume: what cache.form keeps is not the whole of what the live teacher says, so that teacher.placement "
            "cannot change to or from cached within a run; begin another one"
        )
    if changed:
        may_change = ", ".join(may_change_on_resume())
        raise UserError(
            f"--resume: {'; '.join(changed)} (was: in {recipe.output_dir}); only {may_change} and "
            f"the sections {', '.join(SECTIONS_THAT_MAY_CHANGE_ON_RESUME)} may change"
        )
