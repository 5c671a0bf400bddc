"""A lock without an owner goes; one with an owner, or a young one, stays."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from distiller.errors import UserError
from distiller.launch.operator_locks import clear_operator_locks, extension_folder


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    folder = tmp_path / "py311_cpu" / "cpu_adam"
    folder.mkdir(parents=True)
    return folder / "lock"


def test_a_killed_builds_lock_is_removed(lock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import os, signal, sys; from torch.utils.file_baton import FileBaton; "
        "assert FileBaton(sys.argv[1]).try_acquire(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(lock)], check=False).returncode == -9
    assert lock.exists()
    _make_old(lock)
    clear_operator_locks(tmp_path)
    assert not lock.exists()
    assert capsys.readouterr().out == f"note: removed {lock}, which a killed run left while it loaded cpu_adam\n"


def test_a_running_builds_lock_stays(lock: Path, tmp_path: Path) -> None:
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    _make_old(lock)
    clear_operator_locks(tmp_path)
    assert lock.exists()
    baton.release()


def test_a_young_lock_is_waited_for(lock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock.touch()
    threading.Timer(0.5, lock.unlink).start()
    started = time.monotonic()
    clear_operator_locks(tmp_path, patience_s=60)
    assert 0.4 < time.monotonic() - started < 30
    assert capsys.readouterr().out == f"note: waiting up to 60 s for {lock}, which no process of this machine holds\n"


def test_a_young_lock_without_an_owner_goes_in_the_end(lock: Path, tmp_path: Path) -> None:
    lock.touch()
    clear_operator_locks(tmp_path, patience_s=0.5)
    assert not lock.exists()


def test_a_lock_that_cannot_be_removed_is_an_error(lock: Path, tmp_path: Path) -> None:
    lock.touch()
    _make_old(lock)
    # Also root cannot open a folder as a file.
    (tmp_path / ".distiller").mkdir()
    with pytest.raises(UserError, match="set TORCH_EXTENSIONS_DIR to a folder of your own"):
        clear_operator_locks(tmp_path)


def test_the_variable_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    stale = tmp_path / "cpu_adam" / "lock"
    stale.touch()
    _make_old(stale)
    clear_operator_locks(extension_folder())
    assert not stale.exists()


def _make_old(lock: Path) -> None:
    an_hour_ago = time.time() - 3600
    os.utime(lock, (an_hour_ago, an_hour_ago))
