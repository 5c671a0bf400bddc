"""A record that grows by whole lines, and that a run can do without."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import final


@final
class LineFile:
    """One process appends. Lines that cannot be written are left out; stderr says so the first time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_said = False

    def append(self, lines: str) -> None:
        """Adds lines, each with its end, or none of them. Raises nothing that a full or broken disk raises."""
        size = None
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                size = stream.tell()
                stream.write(lines)
        except OSError as error:
            if size is not None:
                # A torn line would spoil the next one.
                with contextlib.suppress(OSError):
                    os.truncate(self.path, size)
            if not self._is_said:
                self._is_said = True
                what = f"{self.path}: {error.strerror or error}; lines of it are lost, training goes on"
                print(f"distiller: {what}", file=sys.stderr, flush=True)
