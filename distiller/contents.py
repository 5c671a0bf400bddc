"""The digest of a file's content, however the file is stored: as it is, as a link, or in the hub's cache."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path

_DIGEST, _SHA256 = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{64}")


def content_digest(file: Path) -> str:
    """BLAKE2b of the whole content, 32 hexadecimal digits. Raises OSError.

    The hub's cache keeps large files under their SHA-256, so their digest is noted down on this machine and each of
    them is read once: the weights of a large teacher take minutes.
    """
    note = _note_of(file)
    if note is not None and (noted := _read(note)) is not None:
        return noted
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    if note is not None:
        _write(note, digest)
    return digest


def _note_of(file: Path) -> Path | None:
    """Where the digest of a file of the hub's cache is noted; None for other files."""
    if not file.is_symlink():
        return None
    blob = file.resolve()
    if blob.parent.name != "blobs" or not _SHA256.fullmatch(blob.name):
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "distiller" / "contents" / blob.name


def _read(note: Path) -> str | None:
    """The noted digest; None where there is none, it is torn, or the home cannot be read."""
    try:
        noted = note.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return noted if _DIGEST.fullmatch(noted) else None


def _write(note: Path, digest: str) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        # Ranks may write the same note at once.
        with tempfile.NamedTemporaryFile("w", encoding="ascii", dir=note.parent, delete=False) as stream:
            stream.write(digest)
        os.replace(stream.name, note)
    except OSError:
        # A home that cannot be written costs time, and no more.
        return
