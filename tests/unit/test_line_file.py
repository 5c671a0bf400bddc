"""Records that a run can do without: a disk that cannot take them costs lines, not the run."""

import os
import resource
import signal
import sys
from contextlib import suppress

from distiller.storage.line_file import LineFile


def test_what_cannot_be_written_is_said_once_and_leaves_whole_lines(tmp_path, capsys):
    file = LineFile(tmp_path / "metrics.jsonl")
    file.append("one\n")
    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # The kernel takes a part of the line and then no more, as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, limit[1]))
        file.append("two, which is too long\n")
        file.append("three, which is too long\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    file.append("four\n")
    assert file.path.read_text() == "one\nfour\n"
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "metrics.jsonl: File too large; lines of it are lost, training goes on" in said


def test_a_folder_that_is_gone(tmp_path, capsys):
    LineFile(tmp_path / "gone" / "metrics.jsonl").append("one\n")
    assert "No such file" in capsys.readouterr().err


def test_a_terminal_that_is_gone_ends_nothing(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        file = LineFile(tmp_path / "gone" / "metrics.jsonl")
        file.append("one\n")
        monkeypatch.undo()
        with suppress(BrokenPipeError):
            gone.close()


def test_lines_of_later_steps_and_half_a_line_are_cut(tmp_path):
    file = LineFile(tmp_path / "metrics.jsonl")
    file.cut_back(3)
    file.append('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    file.cut_back(2)
    assert file.path.read_text() == '{"step": 1}\n{"step": 2}\n'
