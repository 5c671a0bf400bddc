"""The digest of a file's content, however the file is stored: as it is, as a link, or in the hub's cache."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path

_DIGEST, _SHA256 = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{64}")

_known: dict[bytes, bytes] = {}
"""Digests that this process has computed, by those of the files' paths and looks: both packed, for many files."""


def content_digest(file: Path) -> str:
    """BLAKE2b of the whole content, 32 hexadecimal digits. Raises OSError.

    A process reads each file once, for as long as it looks unchanged. The hub's cache keeps large files under their
    SHA-256, so their digest is noted down on this machine and each of them is read once for all processes: the weights
    of a large teacher take minutes.
    """
    look = hashlib.blake2b(repr((os.path.abspath(file), look_of(file))).encode(), digest_size=16).digest()
    if look not in _known:
        note = _note_of(file)
        digest = None if note is None else read_note(note)
        if digest is None:
            digest = read_digest(file)
            if note is not None:
                write_note(note, digest)
        _known[look] = bytes.fromhex(digest)
    return _known[look].hex()


def read_digest(file: Path) -> str:
    """As `content_digest`, read from the file. Raises OSError."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def look_of(file: Path) -> tuple[int, int, int, int]:
    """Size, time, device and inode, of what a link leads to: while they are the same, so is the content."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino


def note_file(name: str) -> Path:
    """Where a digest is noted on this machine, for all runs of the user."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "distiller" / "contents" / name


def read_note(note: Path) -> str | None:
    """The digest that was noted; None where there is none, or none that can be read."""
    try:
        noted = note.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return noted if _DIGEST.fullmatch(noted) else None


def write_note(note: Path, digest: str) -> None:
    """Notes a digest down; where that fails, it does nothing: a home that cannot be written costs time alone."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        # Ranks may write the same note at once.
        with tempfile.NamedTemporaryFile("w", encoding="ascii", dir=note.parent, delete=False) as stream:
            stream.write(digest)
        os.replace(stream.name, note)
    except OSError:
        return


def _note_of(file: Path) -> Path | None:
    """Where the digest of a file of the hub's cache is noted; None for other files."""
    if not file.is_symlink():
        return None
    blob = file.resolve()
    if blob.parent.name != "blobs" or not _SHA256.fullmatch(blob.name):
        return None
    return note_file(blob.name)
