"""Which checkpoint a run continues from, and whether it may."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from distiller.checkpoint.format import OLDER_NAMES, Identity, Progress, steps_in
from distiller.checkpoint.reading import find_damage, read_progress_file
from distiller.distributed.ranks import Ranks
from distiller.errors import UserError

_COMPARED = ("samples_per_update", "num_samples", "data_digest", "mixed_precision", "teacher_dtype")
_REMEDIES = {
    "samples_per_update": "set train.samples_per_update to it",
    "mixed_precision": "set train.mixed_precision to it",
    "teacher_dtype": "set teacher.dtype to it",
}


def latest_step(run_dir: Path) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    return max(steps_in(run_dir / "checkpoints"), default=0)


def check_resumable(run_dir: Path, step: int, identity: Identity) -> Progress:
    """Reads what `step-N` says of itself, and checks that a run of this identity can continue from it.

    Engine and number of processes may differ. Does not communicate.

    Raises:
        UserError: it is damaged, of an older version, or the data, the global batch or the precision differ.
    """
    folder = run_dir / "checkpoints" / f"step-{step}"
    refuse_older(folder)
    try:
        progress = read_progress_file(folder)
    except UserError as error:
        raise UserError(f"--resume: {error}; {_way_out(folder)}") from error
    for name in _COMPARED:
        held, wanted = asdict(progress.identity)[name], asdict(identity)[name]
        if held != wanted:
            remedy = _REMEDIES.get(name, "restore the data, or begin another run")
            raise UserError(f"--resume: {folder} has {name} {held} and this run {wanted}; {remedy}")
    return progress


def verify(run_dir: Path, step: int, ranks: Ranks) -> None:
    """Reads all files of `step-N` and compares their digests; each rank has a share of them. Communicates.

    Raises:
        UserError: on every rank, with the first damaged file and how to continue without it.
    """
    folder = run_dir / "checkpoints" / f"step-{step}"

    def own_share() -> None:
        damage = find_damage(folder, read_progress_file(folder), ranks.rank, ranks.world_size)
        if damage is not None:
            raise UserError(f"--resume: {damage}; {_way_out(folder)}")

    ranks.all_succeed(own_share)


def refuse_older(folder: Path) -> None:
    """UserError for a checkpoint that holds pickles, or did when it was written. Nothing in it is opened."""
    for name in OLDER_NAMES:
        if (folder / name).exists():
            raise UserError(
                f"{folder} is of an older version of distiller ({name}), which kept optimizers as pickles; these are "
                "not read. Finish that run with the version that began it, or begin another one with output_dir=..."
            )


def _way_out(folder: Path) -> str:
    before = [step for step in steps_in(folder.parent) if f"step-{step}" != folder.name]
    then = (
        f"continue from {folder.parent / f'step-{before[-1]}'}" if before else "start at step 1, as there is no other"
    )
    return f"remove {folder} and pass --resume again to {then}"
