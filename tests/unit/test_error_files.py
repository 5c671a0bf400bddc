"""What torch's agent prints last about a launch that failed: our message, for every way a rank ends."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from distiller import cli
from distiller.distributed import rank_failure
from distiller.errors import AgreedError, OwnUserError, QualityGateError, RunError, StoppedError, UserError


@pytest.fixture
def end(tmp_path, monkeypatch, capsys) -> Callable[[int, BaseException], str]:
    """Ends a rank of two with an error, and returns what it says itself."""

    def end(rank: int, error: BaseException) -> str:
        file = tmp_path / "attempt_0" / str(rank) / "error.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        for name, value in {"TORCHELASTIC_ERROR_FILE": file, "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, str(value))

        def command(stops: object) -> None:
            raise error

        try:
            cli.guarded(command)
        except type(error):
            pass
        return capsys.readouterr().err

    return end


def last_lines(tmp_path: Path) -> list[str]:
    """What the launcher's own error says last, when it looks at both ranks at once."""
    files = sorted((tmp_path / "attempt_0").glob("*/error.json"))
    failures = {int(file.parent.name): ProcessFailure(int(file.parent.name), 1, 1, str(file)) for file in files}
    return str(ChildFailedError("distiller", failures)).splitlines()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UserError("data.path: no.txt does not exist"), "distiller: data.path: no.txt does not exist"),
        (OwnUserError("no such GPU"), "distiller, rank 0: no such GPU"),
        (RunError("the disk\nis full"), "distiller, rank 0: the disk is full"),
        (AgreedError("the loss is not finite"), "distiller: the loss is not finite"),
        (QualityGateError("below the gate"), "distiller, rank 0: below the gate"),
        (StoppedError("stopped by SIGTERM", signal.SIGTERM, is_agreed=True), "distiller: stopped by SIGTERM"),
        (KeyboardInterrupt(), "distiller, rank 0: stopped by SIGINT; start it again"),
        (
            OSError(28, "No space left on device", "x"),
            "distiller, rank 0: x: the disk is full; make room and start again",
        ),
        (RuntimeError("a bug"), "distiller, rank 0: RuntimeError: a bug"),
        (KeyError("a bug"), "distiller, rank 0: KeyError: 'a bug'"),
    ],
)
def test_every_way_to_end_is_the_launchers_last_word(end, tmp_path, error, words):
    end(0, error)
    assert last_lines(tmp_path)[-2].startswith(f"  traceback : {words}")


def test_a_rank_that_follows_another_one_gives_its_reason(end, tmp_path):
    """The agent looks at whole seconds, and takes the lowest of the ranks that ended in the same one."""
    assert end(1, RunError("row 3 is damaged")) == "distiller, rank 1: row 3 is damaged\n"
    assert end(0, RuntimeError("Connection closed by peer [127.0.0.1] /gloo/transport/tcp/pair.cc")) == ""
    text = "\n".join(last_lines(tmp_path))
    assert last_lines(tmp_path)[-2] == "  traceback : distiller, rank 1: row 3 is damaged"
    assert "/gloo/" not in text
    assert "gone" not in text


def test_a_path_that_is_not_utf8_is_said(tmp_path, monkeypatch):
    reason = f"distiller: data.path: {os.fsdecode(b'caf' + bytes([0xE9]))} does not exist"
    for rank in (0, 1):
        file = tmp_path / "attempt_0" / str(rank) / "error.json"
        file.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        assert rank_failure.is_first_to_report(reason) == (rank == 0)
        rank_failure.write_error_file(reason, is_own=rank == 0)
        assert json.loads(file.read_text())["message"]["message"] == (r"distiller: data.path: caf\udce9 does not exist")


def test_what_one_rank_alone_can_see_is_not_replaced(end, tmp_path):
    end(0, OwnUserError("no GPU 3"))
    end(1, OwnUserError("no GPU 4"))
    said = [json.loads((tmp_path / "attempt_0" / str(rank) / "error.json").read_text()) for rank in (0, 1)]
    assert [content["message"]["message"] for content in said] == [
        "distiller, rank 0: no GPU 3",
        "distiller, rank 1: no GPU 4",
    ]


def test_a_rank_that_is_ended_by_the_clock_says_so(tmp_path):
    """From the thread, while the main one waits; os._exit runs nothing else."""
    file = tmp_path / "attempt_0" / "0" / "error.json"
    file.parent.mkdir(parents=True)
    program = """
import os, signal, time
from distiller.distributed import shutdown
shutdown.GRACE_S = 0.2
stops = shutdown.StopSignals()
stops.listen()
stops.defer()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(20)
"""
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(file), "RANK": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 128 + signal.SIGTERM
    assert "SIGTERM, and the update under way" in ended.stderr
    assert "  traceback : distiller, rank 0: SIGTERM, and the update under way" in last_lines(tmp_path)[-2]
