"""`-m distiller train` for people who prefer a path.

accelerate launch --config_file FILE.yaml scripts/train.py RECIPE [key.sub=value ...]
"""

import sys

from distiller.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
