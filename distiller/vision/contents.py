"""The digest of many picture files' whole contents, which is read once for as long as the files look unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from tqdm import tqdm

from distiller.errors import UserError
from distiller.storage.content_digests import (
    digest_record,
    read_digest,
    read_recorded_digest,
    record_digest,
    stat_signature,
)
from distiller.storage.stages import digest_of

_THREADS = 8
"""Hashing and reading both run without Python's lock."""


def contents_digest(files: Sequence[Path]) -> str:
    """Of the contents, in this order: the same for a copy of the files, whatever their times. Does not communicate.

    Reads every file, which of a large data set takes as long as a pass over it; the result is noted on this machine
    under the files' paths, sizes, times and inodes, and one of its processes reads while the others wait for the note.
    Where nothing can be noted, each of them reads. Raises UserError for a file that cannot be read.
    """
    try:
        note = digest_record(f"pictures-{digest_of([[str(file.absolute()), *stat_signature(file)] for file in files])}")
        digest = read_recorded_digest(note)
        if digest is None:
            with _alone_where_possible(note):
                digest = read_recorded_digest(note) or _read(files)
                record_digest(note, digest)
        return digest
    except OSError as error:
        raise UserError(f"data.path: {error.filename}: {error.strerror}; restore it") from error


@contextmanager
def _alone_where_possible(note: Path) -> Iterator[None]:
    """Holds the note's lock, where the file system lets one be taken."""
    lock = FileLock(note.with_name(f"{note.name}.lock"))
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError):
        # A home that cannot be written, or without locks.
        pass
    try:
        yield
    finally:
        lock.release()


def _read(files: Sequence[Path]) -> str:
    with (
        ThreadPoolExecutor(_THREADS, "contents") as readers,
        tqdm(readers.map(read_digest, files), total=len(files), desc="read pictures", leave=False) as digests,
    ):
        return digest_of(list(digests))
