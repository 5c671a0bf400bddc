"""Real launches: `accelerate launch` in a process group of its own, with a time limit that leaves no rank behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "accelerate_configs"
LAUNCHER = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
"""`accelerate launch` on a port of its own: two launches that begin in the same moment both find the default one free,
and one of them ends in "address already in use"."""


@dataclass(frozen=True)
class Result:
    """The exit code and output of a launch."""

    code: int
    stdout: str
    stderr: str


def launch(config_file: Path | str, *arguments: str, timeout_s: int = 240, cwd: Path = ROOT) -> Result:
    """`accelerate launch --config_file FILE -m distiller ARGUMENTS`."""
    return start(["--config_file", str(config_file), "-m", "distiller", *arguments], timeout_s, cwd)


def start(arguments: list[str], timeout_s: int, cwd: Path = ROOT) -> Result:
    """`accelerate launch ARGUMENTS`."""
    return run([*LAUNCHER, *arguments], timeout_s, cwd)


def run(command: list[str], timeout_s: int, cwd: Path, environment: Mapping[str, str] | None = None) -> Result:
    """Any command that may launch ranks; the stacks of all of them are printed when the time is up.

    Args:
        environment: variables to set beside those of this process.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=_environment() | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _print_stacks(psutil.Process(process.pid).children(recursive=True))
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"no end within {timeout_s} s:\n{stdout}\n{stderr}") from None
    return Result(process.returncode, stdout, stderr)


class Running:
    """A launch in the background; leaves no process behind."""

    def __init__(self, command: list[str], run_dir: Path, cwd: Path = ROOT) -> None:
        """`run_dir` is the output folder that the command names."""
        self.run_dir, self._output = run_dir, Path(tempfile.mkdtemp()) / "output.txt"
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                command, cwd=cwd, env=_environment(), stdout=output, stderr=output, start_new_session=True
            )
        self._seen: dict[int, psutil.Process] = {}

    @property
    def pid(self) -> int:
        """Process id of the launcher, or of the only process."""
        return self._process.pid

    @property
    def output(self) -> str:
        """The output of all processes so far."""
        return self._output.read_text()

    @property
    def lines(self) -> list[str]:
        """The lines of output that begin with `distiller`."""
        return [line for line in self.output.splitlines() if line.startswith(("distiller:", "distiller, "))]

    def rank(self, number: int) -> int:
        """The process id of a rank of an `accelerate launch`."""
        for process in psutil.Process(self.pid).children():
            if process.environ().get("RANK", "0") == str(number):
                return process.pid
        raise AssertionError(f"no rank {number}:\n{self.output}")

    def wait_for_step(self, step: int, timeout_s: float = 240) -> None:
        """Waits until metrics.jsonl has this step."""
        file = self.run_dir / "metrics.jsonl"

        def is_there() -> bool:
            lines = file.read_text().splitlines() if file.exists() else []
            return bool(lines) and int(lines[-1].split(",")[0].rpartition(" ")[2]) >= step

        self.wait_until(is_there, timeout_s)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Waits for a condition; AssertionError, and no process left, if it takes too long or the launch ends."""
        limit = time.monotonic() + timeout_s
        while not condition():
            self._look()
            if time.monotonic() > limit:
                raise AssertionError(f"not within {timeout_s} s:\n{self.last_words()}")
            if self._process.poll() is not None:
                self.kill_all()
                raise AssertionError(f"ended before:\n{self.output}")
            time.sleep(0.02)

    def wait_until_gone(self, timeout_s: float) -> int:
        """Waits until every process of the launch has ended; returns the launcher's exit code."""
        self._look()
        limit = time.monotonic() + timeout_s
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {timeout_s} s:\n{self.last_words()}") from None
        _, alive = psutil.wait_procs(self._seen.values(), max(0.1, limit - time.monotonic()))
        alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        if alive:
            raise AssertionError(f"still alive after {timeout_s} s: {alive}\n{self.last_words()}")
        return self._process.returncode

    def kill_all(self) -> None:
        """Sends SIGKILL to every process of the launch."""
        self._look()
        for process in self._seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def last_words(self) -> str:
        """Ends every process of the launch; all that was printed, with the stacks of what was still running."""
        self._look()
        _print_stacks(list(self._seen.values()))
        self.kill_all()
        return self.output

    def _look(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.pid)
            self._seen |= {process.pid: process for process in [launcher, *launcher.children(recursive=True)]}


def begin(config_file: Path | str, run_dir: Path, *arguments: str) -> Running:
    """`accelerate launch --config_file FILE -m distiller ARGUMENTS output_dir=RUN_DIR`, left running."""
    command = [*LAUNCHER, "--config_file", str(config_file), "-m", "distiller", *arguments, f"output_dir={run_dir}"]
    return Running(command, run_dir)


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONFAULTHANDLER": "1", "MASTER_PORT": str(free_port())}


def _print_stacks(processes: list[psutil.Process]) -> None:
    """Ends processes by SIGABRT, on which PYTHONFAULTHANDLER prints every thread's stack."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGABRT)
    psutil.wait_procs(processes, timeout=5)


def free_port() -> int:
    """A free port of the loopback interface."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
