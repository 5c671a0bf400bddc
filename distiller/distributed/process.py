"""This process among its siblings and under its launcher. Importing this module does not import torch."""

from __future__ import annotations

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
"""Who started this process, as far as it lived until this module was imported."""

PARENT_GONE = signal.SIGRTMIN + 5 if sys.platform == "linux" else signal.SIGTERM
"""What the kernel sends when the launcher dies: no other signal, so that it is not taken for a second request."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""What asks a run to stop: launchers, keyboards, terminals and batch systems."""


def rank() -> int:
    """This process's number among all, also before there is a process group."""
    return int(os.environ.get("RANK", "0"))


def is_main_process() -> bool:
    """Whether this is rank 0."""
    return rank() == 0


def world_size() -> int:
    """How many processes the launcher says there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launcher_arguments() -> list[str] | None:
    """The arguments of `accelerate launch` if the parent process is one."""
    try:
        command = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return None
    for position, word in enumerate(command[:4]):
        name = Path(word).name
        if name == "accelerate" and command[position + 1 : position + 2] == ["launch"]:
            return command[position + 2 :]
        if name == "accelerate-launch" or word == "accelerate.commands.launch" or word.endswith("commands/launch.py"):
            return command[position + 1 :]
    return None


def signal_when_launcher_dies() -> None:
    """Asks the kernel to send `PARENT_GONE` to this process when the launcher that started it dies.

    torch's elastic agent starts ranks in sessions of their own, and a launcher of one process forwards nothing: after
    its death, by whatever signal, they would live on. Call it when the signal has a handler.
    """
    is_launched = "LOCAL_RANK" in os.environ or launcher_arguments() is not None
    if sys.platform == "linux" and is_launched:
        _signal_at_parents_death(PARENT_GONE)
        if os.getppid() != _PARENT:
            # It died before it could be heeded.
            os.kill(os.getpid(), PARENT_GONE)


def initialize_loader_worker(worker: int) -> None:
    """Makes a loader process live exactly as long as its rank; the first thing that it runs.

    A signal to the whole process group is the rank's business: it still needs its loader for the update under way.
    """
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        _signal_at_parents_death(signal.SIGKILL)


def end_loader_processes() -> None:
    """Kills loader processes that are left; the last thing that a command does.

    The frames of an exception keep them alive, they ignore the SIGTERM that Python sends them at its exit, and it would
    wait for them for ever.
    """
    for child in multiprocessing.active_children():
        child.kill()


def _signal_at_parents_death(number: int) -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def prepare_environment() -> None:
    """Settings that libraries read while they are imported; called before torch is.

    OpenMP threads that spin while they wait slow a rank down by an order of magnitude when its cores are shared with
    another one; and the banners of libraries are not ours to show.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A filter, not a level: DeepSpeed sets its logger's level when it is imported. Skipped steps are in our metrics.
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    # DeepSpeed's calls of torch, once a rank.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if not is_main_process():
        logging.disable(logging.WARNING)
