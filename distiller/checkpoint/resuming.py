"""Finds the checkpoint that a run resumes from, and checks that it can."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from distiller.checkpoint.format import OLDER_NAMES, Identity, Progress, steps_in
from distiller.checkpoint.reading import find_damage, read_progress_file
from distiller.distributed.ranks import Ranks
from distiller.errors import UserError

_COMPARED = ("samples_per_update", "num_samples", "data_digest", "mixed_precision", "teacher_dtype", "quantization")
_REMEDIES = {
    "samples_per_update": "set train.samples_per_update to it",
    "mixed_precision": "set train.mixed_precision to it",
    "teacher_dtype": "set teacher.dtype to it",
    "quantization": "the version that wrote it quantised the teacher in another way; begin another run",
}


def latest_step(run_dir: Path) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    return max(steps_in(run_dir / "checkpoints"), default=0)


def check_resumable(run_dir: Path, step: int, identity: Identity) -> Progress:
    """Reads the progress.json of `step-N`, and checks that a run of this identity can resume from it.

    Engine and number of processes may differ. Does not communicate.

    Raises:
        UserError: it is damaged, of an older version, or the data, the global batch or the precision differ.
    """
    folder = run_dir / "checkpoints" / f"step-{step}"
    refuse_older(folder)
    try:
        progress = read_progress_file(folder)
    except UserError as error:
        raise UserError(f"--resume: {error}; {_remedy(folder)}") from error
    for name in _COMPARED:
        saved, wanted = asdict(progress.identity)[name], asdict(identity)[name]
        if saved != wanted:
            remedy = _REMEDIES.get(name, "restore the data, or begin another run")
            raise UserError(f"--resume: {folder} has {name} {saved} and this run {wanted}; {remedy}")
    return progress


def compilation_notices(saved: Identity, now: Identity) -> list[str]:
    """A line for each model that was compiled otherwise when the checkpoint was written."""
    modes = {
        "train.compile": (saved.student_compile, now.student_compile),
        "teacher.compile": (saved.teacher_compile, now.teacher_compile),
    }
    return [
        f"--resume: {key} was {before} up to this checkpoint and is {after} now, so that roundings change here; "
        f"{key}={before} goes on bit for bit"
        for key, (before, after) in modes.items()
        if before != after
    ]


def verify(run_dir: Path, step: int, ranks: Ranks) -> None:
    """Reads all files of `step-N`, a share of them on each rank, and compares their digests. Communicates.

    Raises:
        UserError: on every rank, with the first damaged file and how to resume without it.
    """
    folder = run_dir / "checkpoints" / f"step-{step}"

    def check_share() -> None:
        damage = find_damage(folder, read_progress_file(folder), ranks.rank, ranks.world_size)
        if damage is not None:
            raise UserError(f"--resume: {damage}; {_remedy(folder)}")

    ranks.all_succeed(check_share)


def refuse_older(folder: Path) -> None:
    """Raises UserError for a checkpoint of an older version, which may hold pickles. Opens none of its files."""
    for name in OLDER_NAMES:
        if (folder / name).exists():
            raise UserError(
                f"{folder} is of an older version of distiller ({name}), which kept optimizers as pickles; these are "
                "not read. Finish that run with the version that began it, or begin another one with output_dir=..."
            )


def _remedy(folder: Path) -> str:
    before = [step for step in steps_in(folder.parent) if f"step-{step}" != folder.name]
    then = (
        f"continue from {folder.parent / f'step-{before[-1]}'}" if before else "start at step 1, as there is no other"
    )
    return f"remove {folder} and pass --resume again to {then}"
