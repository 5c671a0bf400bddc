"""What each command does, after the command line has been read. Importing this package imports torch."""

from distiller.commands.caching import make_cache
from distiller.commands.checking import check
from distiller.commands.finished_runs import evaluate, export, sample
from distiller.commands.gates import make_gates
from distiller.commands.planning import plan
from distiller.commands.training_run import dry_run, train
from distiller.distributed.devices import quiet_libraries

__all__ = ["check", "dry_run", "evaluate", "export", "make_cache", "make_gates", "plan", "sample", "train"]

quiet_libraries()
