"""The digest of many picture files' contents, recorded so that files which look unchanged are not read again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tqdm import tqdm

from distiller.errors import UserError
from distiller.storage.content_digests import (
    digest_record,
    read_digest,
    read_recorded_digest,
    record_digest,
    stat_signature,
)
from distiller.storage.folder_lock import file_lock
from distiller.storage.stages import digest_of

_THREADS = 8
"""Reading threads; hashing and reading both release Python's global lock."""


def contents_digest(files: Sequence[Path]) -> str:
    """The digest of the files' contents in this order; the same for a copy of the files. Does not communicate.

    Reads every file, which takes as long as one pass over the data set. The result is recorded on this machine under
    the files' paths, sizes, times and inodes: one process reads while the others wait for its file lock. Where no
    record can be written, every process reads the files. Raises UserError for a file that cannot be read.
    """
    try:
        record = digest_record(
            f"pictures-{digest_of([[str(file.absolute()), *stat_signature(file)] for file in files])}"
        )
        digest = read_recorded_digest(record)
        if digest is None:
            with _locked_where_possible(record):
                digest = read_recorded_digest(record) or _read(files)
                record_digest(record, digest)
        return digest
    except OSError as error:
        raise UserError(f"data.path: {error.filename}: {error.strerror}; restore it") from error


@contextmanager
def _locked_where_possible(note: Path) -> Iterator[None]:
    """Holds the record's lock, where the file system has locks and can be written, as a home folder may not."""
    with ExitStack() as held:
        with suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(file_lock(note.with_name(f"{note.name}.lock")))
        yield


def _read(files: Sequence[Path]) -> str:
    with (
        ThreadPoolExecutor(_THREADS, "contents") as readers,
        tqdm(readers.map(read_digest, files), total=len(files), desc="read pictures", leave=False) as digests,
    ):
        return digest_of(list(digests))
