"""`python -m distiller` and `accelerate launch -m distiller` start here."""

import sys

from distiller.cli import main
from distiller.distributed.restart import allow_restart


def run() -> int:
    """The program: its process is replaced where a run has to start again."""
    allow_restart()
    return main()


if __name__ == "__main__":
    sys.exit(run())
