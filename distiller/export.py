"""Writes the trained student from a checkpoint's pieces, in the format of its library."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from distiller.checkpoint.format import OLDER_NAMES, PROGRESS_FILE, steps_in
from distiller.checkpoint.reading import CheckpointReader, find_damage, read_progress_file
from distiller.checkpoint.resuming import refuse_older
from distiller.errors import AgreedError, UserError
from distiller.storage.file_modes import follow_umask
from distiller.tasks.base import Task
from distiller.training.run import Run


def export_run(run: Run) -> None:
    """Writes `student/`. Every rank calls it, after the last save. Communicates.

    Reads the final checkpoint's files if there are any, else gathers the weights from the ranks' memory: a student must
    not be lost because a checkpoint, which takes three times its space, could not be written.

    Raises:
        AgreedError: on every rank, if rank 0 cannot write the student.
    """
    saved, target = run.checkpoints.saved_result(run.last_step), Path(run.recipe.output_dir) / "student"
    gathered = run.checkpoints.gathered_result() if saved is None else {}

    def write() -> None:
        try:
            partial = _write(run.task, _read(saved) if saved is not None else gathered, target)
            if target.is_symlink():
                target.unlink()
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        except (OSError, SafetensorError) as error:
            # safetensors reports a full disk as a SafetensorError, which is no OSError.
            raise AgreedError(f"{target}: cannot be written ({_reason(error)}); make room and pass --resume") from error

    # Over gloo and not NCCL, whose timeout is too short for rank 0 to write a large student.
    run.ranks.broadcast_from_main(write)


def export_checkpoint(task: Task[Any, Any], folder: Path, target: Path) -> None:
    """Writes the student of any checkpoint to a new folder. One process; needs neither GPU nor engine.

    Raises:
        UserError: the checkpoint is damaged or of an older version, or `target` cannot be written.
    """
    refuse_older(folder)
    # Before any file's header is trusted.
    damage = find_damage(folder, read_progress_file(folder), 0, 1)
    if damage is not None:
        raise UserError(f"{damage}; export another checkpoint of that run")
    try:
        _write(task, _read(folder), target).rename(target)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--output {target}: cannot be written ({_reason(error)}); give another folder") from error


def find_checkpoint(given: Path) -> Path:
    """The checkpoint that `given` is, or the newest one of the run in `given`. Raises UserError if there is none."""
    if any((given / name).exists() for name in (PROGRESS_FILE, *OLDER_NAMES)):
        return given
    steps = steps_in(given / "checkpoints")
    if not steps:
        raise UserError(f"{given}: is neither a checkpoint (checkpoints/step-N) nor the folder of a run that has one")
    return given / "checkpoints" / f"step-{steps[-1]}"


def _read(folder: Path) -> dict[str, Tensor]:
    reader = CheckpointReader(folder)
    try:
        return dict(reader.whole(reader.exported_kind))
    finally:
        reader.close()


def _write(task: Task[Any, Any], state: dict[str, Tensor], target: Path) -> Path:
    """Writes to a temporary folder beside `target`, for the caller to rename; leaves nothing behind after an error."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        task.export(state, partial)
        follow_umask(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return partial


def _reason(error: OSError | SafetensorError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
