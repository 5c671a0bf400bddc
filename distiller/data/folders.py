"""Lists the files of a data folder: follows links to folders, stops at cycles of links, leaves hidden entries out."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from distiller.errors import UserError

_FolderId = tuple[int, int]
"""(device, inode)."""


def files_below(folder: Path) -> list[Path]:
    """All files at any depth, sorted by path.

    A link to a folder is followed, except to an ancestor of its own. A link whose target is missing counts as a file,
    which raises an error when it is read. Files and folders whose name begins with a dot are left out.

    Raises:
        UserError: a folder cannot be read.
    """
    return sorted(_walk(folder, (), with_hidden=False))


def folders_in(folder: Path) -> list[Path]:
    """The folders and links to folders directly inside, sorted; no hidden ones, and no links to `folder` itself."""
    ancestors = (_id_of(folder),)
    found = [entry for entry in _entries(folder) if _is_folder(entry) and not entry.name.startswith(".")]
    return sorted(folder / entry.name for entry in found if not _is_ancestor(entry, ancestors))


def has_linked_folder(folder: Path) -> bool:
    """Whether a folder at any depth below is a link."""
    return any(os.path.islink(os.path.join(root, name)) for root, names, _ in os.walk(folder) for name in names)


def files_matching(pattern: str) -> list[Path]:
    """The files that a glob names, sorted. `**` is any number of folders, links included, without cycles.

    `glob.glob` follows a cycle of links until the system refuses the path, and returns each file dozens of times.
    """
    parts = Path(pattern).parts
    if "**" not in parts:
        return sorted(file for name in glob.glob(pattern) if (file := Path(name)).is_file())
    first = next(i for i, part in enumerate(parts) if any(mark in part for mark in "*?["))
    base, wanted = Path(*parts[:first]), parts[first:]
    if not base.is_dir():
        return []
    found = _walk(base, (), with_hidden=True)
    return sorted(file for file in found if file.is_file() and _matches(file.relative_to(base).parts, wanted))


def _walk(folder: Path, ancestors: tuple[_FolderId, ...], with_hidden: bool) -> Iterator[Path]:
    ancestors = (*ancestors, _id_of(folder))
    for entry in _entries(folder):
        if entry.name.startswith(".") and not with_hidden:
            continue
        path = folder / entry.name
        if not _is_folder(entry):
            # No pipes, sockets or devices: reading one waits for a writer.
            if os.path.isfile(path) or not os.path.exists(path):
                yield path
        elif not _is_ancestor(entry, ancestors):
            yield from _walk(path, ancestors, with_hidden)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    # scandir tells files from folders without a system call for each entry.
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise UserError(f"data.path: the folder {folder} cannot be read ({error.strerror})") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _is_ancestor(entry: os.DirEntry[str], ancestors: tuple[_FolderId, ...]) -> bool:
    # Also for folders that are no links: below a link to an ancestor, the walk reaches the first folder again.
    return _id_of(Path(entry.path)) in ancestors


def _id_of(folder: Path) -> _FolderId:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _matches(parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        skips_one = bool(parts) and not parts[0].startswith(".") and _matches(parts[1:], pattern)
        return skips_one or _matches(parts, pattern[1:])
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
