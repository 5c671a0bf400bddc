"""The digest of a file's content, whatever the file is called and however it is stored."""

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
"""A file that changed less than this ago may change again within the resolution of the file system's times."""

_DIGEST, _SHA256 = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{64}")

_known: dict[bytes, bytes] = {}
"""Digests that this process has computed, by those of the files' paths and looks: both packed, for many files."""


def content_digest(file: Path) -> str:
    """BLAKE2b of the whole content, 32 hexadecimal digits. Raises OSError.

    A process reads each file once, for as long as it looks unchanged. The weights of a large teacher take minutes, so
    their digest is noted down on this machine and they are read once for all processes: the hub's cache keeps large
    files under their SHA-256; other large safetensors files are known by their path, size and times.
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


def look_of(file: Path) -> tuple[int, int, int, int, int]:
    """Size, times, device and inode, of what a link leads to: while they are the same, so is the content.

    The time of the last change of any kind is among them, which no program sets.
    """
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino


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
    """Where the digest is noted of a file of the hub's cache, or of large weights; None for other files."""
    found = file.resolve()
    if file.is_symlink() and found.parent.name == "blobs" and _SHA256.fullmatch(found.name):
        return note_file(found.name)
    about = file.stat()
    is_settled = time.time() - max(about.st_mtime, about.st_ctime) > SETTLED_S
    if found.suffix != ".safetensors" or about.st_size < LARGE_BYTES or not is_settled:
        return None
    known_by = f"{found}\0{look_of(file)}"
    return note_file(f"file-{hashlib.sha256(os.fsencode(known_by)).hexdigest()}")
