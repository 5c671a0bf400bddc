"""Stages before the loop leave keyed folders: complete under their key, or absent under it.

A folder's name carries the digest of everything that its content depends on, so a changed input is another folder and
a stale one is never used. Work goes on in `NAME.partial`, which the last rename turns into `NAME`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.storage.content_digests import content_digest
from distiller.storage.file_modes import follow_umask
from distiller.storage.stage_folders import StageFolders

KEY_FILE = "key.json"


@dataclass(frozen=True)
class Stage:
    """One stage's output folder, found by its key."""

    name: str
    key: Mapping[str, Any]
    places: Path | StageFolders

    @property
    def folder(self) -> Path:
        """The complete result, or where it will be."""
        own = self._own_parent / self._folder_name
        if isinstance(self.places, StageFolders) and self.places.cached is not None and not _is_finished(own):
            cached = self.places.cached / self._folder_name
            return cached if _is_finished(cached) else own
        return own

    @property
    def partial(self) -> Path:
        """Where the result is being made; safe to continue from, since it has the same key."""
        return self._own_parent / f"{self._folder_name}.partial"

    @property
    def is_complete(self) -> bool:
        """Whether the result can be read."""
        return _is_finished(self.folder)

    @property
    def under_other_keys(self) -> list[Path]:
        """Complete results of this name that were made from something else, in the folder where this one is looked for.

        Sorted by path.
        """
        found = (folder for folder in self._own_parent.glob(f"{self.name}-*") if _is_finished(folder))
        return sorted(folder for folder in found if folder.name != self._folder_name and folder.suffix != ".partial")

    @property
    def _own_parent(self) -> Path:
        return self.places.own if isinstance(self.places, StageFolders) else self.places

    @property
    def _folder_name(self) -> str:
        return f"{self.name}-{digest_of(self.key)[:16]}"

    def make_once(self, is_maker: bool, make: Callable[[], None]) -> None:
        """Lets one process of each machine make the result if it is missing; the machine's others wait for its file.

        No collective is involved that could time out, however long it takes. Another run that makes the same result,
        or another node on the same file system, waits for its lock and finds it made.
        """
        if is_maker and not self.is_complete:
            self._own_parent.mkdir(parents=True, exist_ok=True)
            with self._lock():
                if not self.is_complete:
                    make()
        self.wait()

    def made_by_main(self, ranks: Ranks, make: Callable[[], None]) -> None:
        """Lets rank 0 make the result if it is missing; the others wait for rank 0, as long as it lives.

        Every rank calls it. Communicates from host to host. Another run that makes the same result is waited for.
        """
        if ranks.is_main:
            self.make_once(True, make)
        ranks.wait_for_hours()
        self.wait()

    @contextmanager
    def made_by_all(self, ranks: Ranks) -> Iterator[bool]:
        """For a stage that all ranks of a run make together, one run at a time: whether there is still work to do.

        The same on every rank. Rank 0 holds the stage's lock as long as the body takes. Communicates from host to host.
        """
        with ExitStack() as held:
            if ranks.is_main:
                self._own_parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(self._lock())
                if not self.is_complete:
                    self.partial.mkdir(parents=True, exist_ok=True)
            ranks.wait_for_hours()
            yield ranks.from_main(lambda: not self.is_complete)

    def finish(self) -> None:
        """Makes the partial folder the complete one; called by one process."""
        (self.partial / KEY_FILE).write_text(json.dumps(self.key, indent=1, sort_keys=True), encoding="utf-8")
        follow_umask(self.partial)
        os.replace(self.partial, self._own_parent / self._folder_name)

    def _lock(self) -> FileLock:
        return FileLock(self._own_parent / f".{self._folder_name}.lock")

    def wait(self, poll_s: float = 0.1) -> None:
        """Waits until another process has finished, and this machine sees it. UserError for files of somebody else."""
        while not self.is_complete:
            time.sleep(poll_s)
        refuse_unreadable(sorted(self.folder.iterdir()))

    def copy_into(self, parent: Path) -> None:
        """Puts the complete result into another folder of stages too; does nothing where it is there. One process.

        On one file system the copies are hard links to the same files, which nobody writes again. Raises OSError.
        """
        target = parent / self._folder_name
        if _is_finished(target):
            return
        partial = target.with_name(f"{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(self.folder, partial, copy_function=_link_or_copy)
        os.replace(partial, target)


def refuse_unreadable(files: Iterable[Path]) -> None:
    """UserError for the first file that this process may not read."""
    closed = next((file for file in files if not os.access(file, os.R_OK)), None)
    if closed is not None:
        raise UserError(
            f"cache_dir: {closed} is another user's and cannot be read (older versions left files to their owner "
            "alone); its owner can chmod -R g+r the folder, or choose another one with cache_dir=..."
        )


def _is_finished(folder: Path) -> bool:
    return (folder / KEY_FILE).is_file()


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        # Another file system, or one without hard links.
        shutil.copyfile(source, target)


def digest_of(value: Any) -> str:
    """The digest of anything that JSON can hold, independent of key order."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def digest_files(files: Iterable[Path]) -> str:
    """The digest of the files' names and whole contents, in sorted order; links count as what they lead to."""
    total = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        total.update(f"{file.name}:{content_digest(file)};".encode())
    return total.hexdigest()
