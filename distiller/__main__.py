"""`python -m distiller` and `accelerate launch -m distiller` start here."""

import sys

from distiller.cli import main

if __name__ == "__main__":
    sys.exit(main())
