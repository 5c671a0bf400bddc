"""Output folders of the stages before the loop, named by a key; a folder is either complete or absent.

The name ends with a digest of everything that the content depends on, so a changed input leads to another folder and a
stale one is never used. A stage is made in `NAME.partial`, which is renamed to `NAME` when it is complete.
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
from typing import Any, final

from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.storage.content_digests import content_digest
from distiller.storage.file_modes import follow_umask
from distiller.storage.folder_lock import file_lock
from distiller.storage.stage_folders import StageFolders

KEY_FILE = "key.json"


@final
@dataclass(frozen=True)
class Stage:
    """One stage's output folder, found by its key. `key` is for JSON."""

    name: str
    key: Mapping[str, Any]
    folders: Path | StageFolders

    @property
    def folder(self) -> Path:
        """The complete result, or where it will be."""
        primary = self._parent / self._folder_name
        if isinstance(self.folders, StageFolders) and self.folders.cached is not None and not _is_finished(primary):
            cached = self.folders.cached / self._folder_name
            return cached if _is_finished(cached) else primary
        return primary

    @property
    def partial(self) -> Path:
        """Where the result is being made; safe to continue from, since it belongs to the same key."""
        return self._parent / f"{self._folder_name}.partial"

    @property
    def is_complete(self) -> bool:
        """Whether the result can be read."""
        return _is_finished(self.folder)

    @property
    def results_of_other_keys(self) -> list[Path]:
        """Complete results of this stage under other keys (other inputs), in the folder where it is made; sorted."""
        found = (folder for folder in self._parent.glob(f"{self.name}-*") if _is_finished(folder))
        return sorted(folder for folder in found if folder.name != self._folder_name and folder.suffix != ".partial")

    @property
    def _parent(self) -> Path:
        return self.folders.primary if isinstance(self.folders, StageFolders) else self.folders

    @property
    def _folder_name(self) -> str:
        return f"{self.name}-{digest_of(self.key)[:16]}"

    def make_once(self, is_maker: bool, make: Callable[[], None]) -> None:
        """Makes the result in one process of each machine if it is missing; the other processes wait for its file.

        No collective is involved that could time out. Another run that makes the same result, or another node on the
        same file system, waits for the stage's lock and then finds the result complete.
        """
        if is_maker and not self.is_complete:
            self._parent.mkdir(parents=True, exist_ok=True)
            with self._lock():
                if not self.is_complete:
                    make()
        self.wait_until_complete()

    def make_on_main(self, ranks: Ranks, make: Callable[[], None]) -> None:
        """Makes the result on rank 0 if it is missing; the others wait, and fail if rank 0 dies.

        Every rank calls it. Communicates over gloo. Waits for another run that makes the same result.
        """
        if ranks.is_main:
            self.make_once(True, make)
        ranks.interruptible_barrier()
        self.wait_until_complete()

    @contextmanager
    def make_on_all_ranks(self, ranks: Ranks) -> Iterator[bool]:
        """For a stage that all ranks of a run make together: yields, on every rank, whether it is missing.

        Rank 0 holds the stage's lock until the block ends, so that one run at a time makes it. Communicates over gloo.
        """
        with ExitStack() as held:
            if ranks.is_main:
                self._parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(self._lock())
                if not self.is_complete:
                    self.partial.mkdir(parents=True, exist_ok=True)
            ranks.interruptible_barrier()
            yield ranks.broadcast_from_main(lambda: not self.is_complete)

    def finish(self) -> None:
        """Makes the partial folder the complete one; called by one process."""
        (self.partial / KEY_FILE).write_text(json.dumps(self.key, indent=1, sort_keys=True), encoding="utf-8")
        follow_umask(self.partial)
        os.replace(self.partial, self._parent / self._folder_name)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with file_lock(self._parent / f".{self._folder_name}.lock") as is_held:
            if not is_held:
                where = f"{self._parent} lies on a file system without locks"
                print(f"note: {where}: two runs may make the same stage at once")
            yield

    def wait_until_complete(self, poll_s: float = 0.1) -> None:
        """Polls until the result is complete and visible on this machine. UserError if a file of it is unreadable."""
        while not self.is_complete:
            time.sleep(poll_s)
        refuse_unreadable(sorted(self.folder.iterdir()))

    def copy_into(self, parent: Path) -> None:
        """Copies the complete result into another folder of stages, unless it is there. Called by one process.

        On one file system the copies are hard links: finished stages are never written again. Raises OSError.
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
