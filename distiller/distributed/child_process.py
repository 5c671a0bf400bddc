"""A process that works for a rank: `python -m distiller.distributed.child_process PARENT MODULE ARGUMENT`.

Runs `main(ARGUMENT)` of a module once signals and environment are set: importing libraries takes seconds, in which
Ctrl-C would end the process, and in which its parent may die. Importing this module does not import torch.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from distiller.distributed.process import live_as_long_as_parent, prepare_environment


def command(module: str, argument: str) -> list[str]:
    """The command line with which this process starts it."""
    return [sys.executable, "-m", __name__, str(os.getpid()), module, argument]


def main(parent: str, module: str, argument: str) -> int:
    """Runs it; returns its exit code."""
    prepare_environment()
    live_as_long_as_parent()
    if os.getppid() != int(parent):
        # It died before the kernel was asked to tell.
        return 1
    return import_module(module).main(argument)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
