"""A file to which lines are appended; a failure to write does not end the run."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import final


@final
class LineFile:
    """Appends lines, from one process. Lines that cannot be written are dropped, with one message on stderr."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._has_warned = False

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
                print(f"distiller: {what}", file=sys.stderr, flush=True)
