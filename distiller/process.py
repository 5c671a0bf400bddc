"""This process among its siblings and under its launcher. Importing this module does not import torch."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

import psutil


def rank() -> int:
    """This process's number among all, also before there is a process group."""
    return int(os.environ.get("RANK", "0"))


def is_main_process() -> bool:
    """Whether this is rank 0."""
    return rank() == 0


def is_first_on_other_machine() -> bool:
    """Whether this is the first rank of a machine without rank 0."""
    return not is_main_process() and os.environ.get("LOCAL_RANK") == "0"


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


def die_with_launcher() -> None:
    """Asks the kernel to kill this process when the launcher that started it dies.

    torch's elastic agent starts ranks in sessions of their own: after SIGKILL of the launcher they would live on.
    """
    is_launched = "LOCAL_RANK" in os.environ or launcher_arguments() is not None
    if sys.platform == "linux" and is_launched:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def prepare_environment() -> None:
    """Settings that libraries read while they are imported; called before torch is.

    OpenMP threads that spin while they wait slow a rank down by an order of magnitude when its cores are shared with
    another one; and the banners of libraries are not ours to show.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if not is_main_process():
        logging.disable(logging.WARNING)
