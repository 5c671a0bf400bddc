"""Where a run's sessions ran: one entry a training session in the run's environment.json. Imports no torch."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from distiller import __version__
from distiller.distributed.process import print_to_stderr
from distiller.run_folder.files import ENVIRONMENT_FILE
from distiller.storage.durable_writes import write_durably

GIB = 2**30
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "diffusers")
GIT_TIMEOUT_S = 5.0
HIDDEN = "***"
_SECRET = r"(?:token|key|password|secret)[\w.\-]*"
_SECRET_VALUE = re.compile(rf"({_SECRET}[\"']?\s*[=:]).+", re.IGNORECASE | re.DOTALL)
_SECRET_OPTION = re.compile(rf"--?[\w.\-]*{_SECRET}", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(\w+://)[^/@\s]+@")

Session = dict[str, Any]
"""A session as JSON; `describe_session` has its keys."""


def describe_session(
    first_step: int, world_size: int, engine: str, gpus: Sequence[tuple[str, int]], cuda: str | None
) -> Session:
    """This process's machine, its software and its command line, without any environment variable.

    Args:
        first_step: of the session.
        gpus: name and memory in bytes of each GPU of this machine; none where the run uses none.
        cuda: the version that torch was built for.

    Returns:
        `started` (ISO 8601, UTC), `first_step`, `host`, `gpus` (`name`, `memory_gib`), `cpu` (`model`, `cores`),
        `host_memory_gib`, `world_size`, `engine`, `versions` (None of a package that is not installed), `git`
        (`commit`, `is_dirty`; None outside of a repository) and `command`, whose secrets are hidden.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "first_step": first_step,
        "host": socket.gethostname(),
        "gpus": [{"name": name, "memory_gib": round(num_bytes / GIB, 2)} for name, num_bytes in gpus],
        "cpu": {"model": _cpu_model(), "cores": os.cpu_count()},
        "host_memory_gib": round(psutil.virtual_memory().total / GIB, 2),
        "world_size": world_size,
        "engine": engine,
        "versions": {
            "distiller": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
            "cuda": cuda,
        },
        "git": git_state(Path.cwd()),
        "command": without_secrets(sys.argv),
    }


def append_session(folder: Path, session: Session) -> None:
    """Adds a session to the list in the run's environment.json. Where it cannot be written, says so and goes on."""
    file = folder / ENVIRONMENT_FILE
    try:
        write_durably(file, json.dumps([*read_sessions(folder), session], indent=2) + "\n")
    except OSError as error:
        print_to_stderr(f"distiller: {file}: {error.strerror or error}; it lacks this session, training goes on")


def read_sessions(folder: Path) -> list[Session]:
    """The sessions of a run, oldest first; none where the file is missing or damaged."""
    try:
        content = json.loads((folder / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [session for session in content if isinstance(session, dict)] if isinstance(content, list) else []


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line in which values of options and keys named token, key, password or secret are hidden.

    So are the names and passwords in addresses. The rest of a word is hidden from such a key on: too much is better
    than too little.
    """
    shown: list[str] = []
    hides_next = False
    for word in words:
        masked = _URL_LOGIN.sub(rf"\1{HIDDEN}@", _SECRET_VALUE.sub(rf"\1{HIDDEN}", word))
        shown.append(HIDDEN if hides_next else masked)
        hides_next = _SECRET_OPTION.fullmatch(word) is not None
    return shown


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of the repository that a folder lies in, and whether its files were changed since.

    None where there is none, where git is not installed, and where it takes longer than `GIT_TIMEOUT_S` seconds.
    """
    commit, changes = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain", "--untracked-files=no")
    if commit is None:
        return None
    return {"commit": commit, "is_dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        # Without locks: a repository that is being worked in must not be disturbed.
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
