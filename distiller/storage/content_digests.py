"""The digest of a file's content, whatever the file is called and however it is stored."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from pathlib import Path

LARGE_BYTES = 64 * 2**20
"""From this size on, the digest of weights in a plain folder is recorded on disk."""

SETTLED_S = 2.0
"""A file that changed less than this ago may change again within the resolution of the file system's times."""

_DIGEST, _SHA256 = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{64}")

_computed: dict[bytes, bytes] = {}
"""Content digests that this process knows, by the digest of path and stat signature; as bytes, to hold many files."""


def content_digest(file: Path) -> str:
    """BLAKE2b of the whole content, 32 hexadecimal digits. Raises OSError.

    A process reads each file once, for as long as its stat signature stays the same. Reading the weights of a large
    teacher takes minutes, so their digest is recorded in the user's cache folder and they are read once for all
    processes: the hub's cache names large files by their SHA-256, which is the record's name; other large safetensors
    files are identified by path and stat signature.
    """
    identity = repr((os.path.abspath(file), stat_signature(file))).encode()
    key = hashlib.blake2b(identity, digest_size=16).digest()
    if key not in _computed:
        record = _record_of(file)
        digest = None if record is None else read_recorded_digest(record)
        if digest is None:
            digest = read_digest(file)
            if record is not None:
                record_digest(record, digest)
        _computed[key] = bytes.fromhex(digest)
    return _computed[key].hex()


def read_digest(file: Path) -> str:
    """As `content_digest`, read from the file. Raises OSError."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def stat_signature(file: Path) -> tuple[int, int, int, int, int]:
    """Size, mtime, ctime, device and inode of a file, links followed: while they are the same, so is the content.

    ctime, the time of the last change of content or attributes, cannot be set by a program.
    """
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino


def digest_record(name: str) -> Path:
    """The file that holds a recorded digest on this machine, for all runs of the user."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "distiller" / "contents" / name


def read_recorded_digest(record: Path) -> str | None:
    """The recorded digest; None where there is none, or none that can be read."""
    try:
        digest = record.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return digest if _DIGEST.fullmatch(digest) else None


def record_digest(record: Path, digest: str) -> None:
    """Writes a record. Does nothing where that fails: without the record, the next process reads the file again."""
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        # Ranks may write the same record at once.
        with tempfile.NamedTemporaryFile("w", encoding="ascii", dir=record.parent, delete=False) as stream:
            stream.write(digest)
        os.replace(stream.name, record)
    except OSError:
        return


def _record_of(file: Path) -> Path | None:
    """The record of a file in the hub's cache, or of large weights; None for other files."""
    target = file.resolve()
    if file.is_symlink() and target.parent.name == "blobs" and _SHA256.fullmatch(target.name):
        return digest_record(target.name)
    status = file.stat()
    is_settled = time.time() - max(status.st_mtime, status.st_ctime) > SETTLED_S
    if target.suffix != ".safetensors" or status.st_size < LARGE_BYTES or not is_settled:
        return None
    identity = f"{target}\0{stat_signature(file)}"
    return digest_record(f"file-{hashlib.sha256(os.fsencode(identity)).hexdigest()}")
