"""The digest of a file's content, however the file is stored: as it is, as a link, or in the hub's cache."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from pathlib import Path

LARGE_BYTES = 64 * 2**20
"""From this size on, the digest of weights that lie in a plain folder is noted down."""
SETTLED_S = 2.0
_DIGEST, _SHA256 = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{64}")


def content_digest(file: Path) -> str:
    """BLAKE2b of the whole content, 32 hexadecimal digits. Raises OSError.

    The weights of a large teacher take minutes, so their digest is noted down on this machine and each of them is read
    once: the hub's cache keeps large files under their SHA-256; other large safetensors files are known by their path,
    size and times.
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
    """Where the digest is noted of a file of the hub's cache, or of large weights; None for other files."""
    found = file.resolve()
    if file.is_symlink() and found.parent.name == "blobs" and _SHA256.fullmatch(found.name):
        return _notes() / found.name
    about = file.stat()
    # What has just been written may be written again within the resolution of the file system's times.
    is_settled = time.time() - max(about.st_mtime, about.st_ctime) > SETTLED_S
    if found.suffix != ".safetensors" or about.st_size < LARGE_BYTES or not is_settled:
        return None
    # The time of the last change of any kind is one that no program sets.
    known_by = f"{found}\0{about.st_ino}\0{about.st_size}\0{about.st_mtime_ns}\0{about.st_ctime_ns}"
    return _notes() / f"file-{hashlib.sha256(os.fsencode(known_by)).hexdigest()}"


def _notes() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "distiller" / "contents"


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
