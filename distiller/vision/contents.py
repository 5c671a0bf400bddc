"""The digest of many picture files' whole contents, which is read once for as long as the files look unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from distiller.contents import content_digest
from distiller.errors import UserError
from distiller.stage_places import StagePlaces
from distiller.stages import Stage, digest_of

_DIGEST_FILE = "digest.txt"
_THREADS = 8
"""Hashing and reading both run without Python's lock."""


def contents_digest(files: Sequence[Path], stages_dir: Path | StagePlaces) -> str:
    """Of the contents, in this order: the same for a copy of the files, whatever their times. Does not communicate.

    Reads every file, which of a large data set takes as long as a pass over it; the result is kept in a stage under
    the files' paths, sizes, times and inodes. Raises UserError.
    """
    try:
        looks = [[str(file.absolute()), *_look(file)] for file in files]
        stage = Stage("picture-contents", {"files": digest_of(looks)}, stages_dir)
        stage.make_once(True, lambda: _make(stage, files))
        return (stage.folder / _DIGEST_FILE).read_text(encoding="ascii")
    except OSError as error:
        raise UserError(f"data.path: {error.filename}: {error.strerror}; restore it, or set cache_dir=...") from error


def _look(file: Path) -> tuple[int, int, int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino


def _make(stage: Stage, files: Sequence[Path]) -> None:
    with (
        ThreadPoolExecutor(_THREADS, "contents") as readers,
        tqdm(readers.map(content_digest, files), total=len(files), desc="read pictures", leave=False) as digests,
    ):
        digest = digest_of(list(digests))
    stage.partial.mkdir(parents=True, exist_ok=True)
    (stage.partial / _DIGEST_FILE).write_text(digest, encoding="ascii")
    stage.finish()
