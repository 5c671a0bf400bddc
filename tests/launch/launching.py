"""Real launches: `accelerate launch` in a process group of its own, with a time limit that leaves no rank behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "accelerate_configs"


@dataclass(frozen=True)
class Result:
    """What a launch ended with."""

    code: int
    stdout: str
    stderr: str


def launch(config_file: Path | str, *arguments: str, timeout_s: int = 240, cwd: Path = ROOT) -> Result:
    """`accelerate launch --config_file FILE -m distiller ARGUMENTS`."""
    return start(["--config_file", str(config_file), "-m", "distiller", *arguments], timeout_s, cwd)


def start(arguments: list[str], timeout_s: int, cwd: Path = ROOT) -> Result:
    """`accelerate launch ARGUMENTS`."""
    return run([sys.executable, "-m", "accelerate.commands.launch", *arguments], timeout_s, cwd)


def run(command: list[str], timeout_s: int, cwd: Path, environment: Mapping[str, str] | None = None) -> Result:
    """Any command that may launch ranks; the stacks of all of them are printed when the time is up.

    Args:
        environment: variables to set beside those of this process.
    """
    environment = os.environ | {"PYTHONFAULTHANDLER": "1", "MASTER_PORT": str(_free_port())} | (environment or {})
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # PYTHONFAULTHANDLER prints every thread's stack on SIGABRT.
        for pid in _descendants(process.pid):
            os.kill(pid, signal.SIGABRT)
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"no end within {timeout_s} s:\n{stdout}\n{stderr}") from None
    return Result(process.returncode, stdout, stderr)


def _descendants(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
