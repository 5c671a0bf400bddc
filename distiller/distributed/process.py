"""This process's rank, launcher, child processes and environment. Importing this module does not import torch."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import warnings
from pathlib import Path

import psutil

_PARENT = os.getppid()
"""The process that started this one, if it still ran when this module was imported."""

PARENT_GONE = signal.SIGRTMIN + 5 if sys.platform == "linux" else signal.SIGTERM
"""Sent by the kernel when the launcher dies. On Linux not one of `STOP_SIGNALS`, a second of which ends the process."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a run to stop; from launchers, keyboards, terminals and batch systems."""


def print_to_stderr(line: str) -> None:
    """Prints a line. Does not raise where stderr is a pipe that nobody reads any more, or a file on a full disk."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def rank() -> int:
    """This process's rank, also before there is a process group."""
    return int(os.environ.get("RANK", "0"))


def is_main_process() -> bool:
    """Whether this is rank 0."""
    return rank() == 0


def world_size() -> int:
    """The number of processes, as the launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launcher_arguments() -> list[str] | None:
    """The arguments of `accelerate launch` if the parent process is one."""
    try:
        command = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return None
    for i, word in enumerate(command[:4]):
        name = Path(word).name
        if name == "accelerate" and command[i + 1 : i + 2] == ["launch"]:
            return command[i + 2 :]
        if name == "accelerate-launch" or word == "accelerate.commands.launch" or word.endswith("commands/launch.py"):
            return command[i + 1 :]
    return None


def signal_when_launcher_dies() -> None:
    """Asks the kernel to send `PARENT_GONE` to this process when the launcher that started it dies.

    torch's elastic agent starts ranks in sessions of their own, and a launcher of one process forwards no signals: the
    ranks would outlive it. Call this when the signal has a handler.
    """
    is_launched = "LOCAL_RANK" in os.environ or launcher_arguments() is not None
    if sys.platform == "linux" and is_launched:
        _signal_at_parents_death(PARENT_GONE)
        if os.getppid() != _PARENT:
            # It died before the request was made.
            os.kill(os.getpid(), PARENT_GONE)


def live_as_long_as_parent() -> None:
    """Makes a process that works for a rank live exactly as long as the rank, which has started it.

    It ignores `STOP_SIGNALS`: the rank handles them, and still needs it for the update under way.
    """
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        _signal_at_parents_death(signal.SIGKILL)


def initialize_loader_worker(worker: int) -> None:
    """See `live_as_long_as_parent`; a DataLoader's `worker_init_fn`."""
    live_as_long_as_parent()


def end_loader_processes() -> None:
    """Kills loader processes that are left, at the end of a command.

    An exception's frames keep them alive, they ignore the SIGTERM that Python sends to daemonic children at its exit,
    and Python would wait for them for ever. Other children belong to the program that called the command.
    """
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _signal_at_parents_death(number: int) -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)


def _is_of_use(record: logging.LogRecord) -> bool:
    return "kernels-community" not in str(record.msg) and "requires torchvision" not in str(record.msg)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def prepare_environment() -> None:
    """Settings that libraries read while they are imported; called before torch is.

    OpenMP threads that spin while they wait slow a rank down by an order of magnitude when it shares its cores with
    another rank. Other settings silence the libraries' own output.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A filter, not a level: DeepSpeed sets its logger's level when it is imported. Skipped steps are in our metrics.
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    # On packages that nothing here uses: their kernels for a CPU, and torchvision in place of Pillow.
    for name in ("bitsandbytes.backends.cpu.ops", "transformers.utils.import_utils"):
        logging.getLogger(name).addFilter(_is_of_use)
    # DeepSpeed's calls of torch, once a rank.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # Norms with float32 weights under autocast, while their block is traced for the compiler, which fuses them itself.
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
    if not is_main_process():
        logging.disable(logging.WARNING)
