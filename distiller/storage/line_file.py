"""A file to which lines are appended; a failure to write does not end the run."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import final

from distiller.distributed.process import print_to_stderr
from distiller.storage.durable_writes import write_durably


@final
class LineFile:
    """Appends lines, from one process. Lines that cannot be written are dropped, with one message on stderr."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._has_warned = False

    def cut_back(self, last_step: int) -> None:
        """Drops the lines (JSON objects) whose `step` is later, and an incomplete last line. Raises OSError."""
        if not self.path.is_file():
            return
        kept: list[str] = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= last_step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue
        write_durably(self.path, "".join(kept))

    def append(self, lines: str) -> None:
        """Appends lines, each with its newline, or none of them. Does not raise OSError."""
        size = None
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                size = stream.tell()
                stream.write(lines)
        except OSError as error:
            if size is not None:
                # A partial line would corrupt the next one.
                with contextlib.suppress(OSError):
                    os.truncate(self.path, size)
            if not self._has_warned:
                self._has_warned = True
                what = f"{self.path}: {error.strerror or error}; lines of it are lost, training goes on"
                print_to_stderr(f"distiller: {what}")
