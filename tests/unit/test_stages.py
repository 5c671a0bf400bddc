"""Keyed folders that several processes, and several runs, make or wait for."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from filelock import FileLock

from distiller.errors import UserError, full_disk
from distiller.storage.growing_tensors import GrowingTensors
from distiller.storage.stages import Stage, digest_of
from tests import toys


@pytest.mark.timeout(60)
def test_two_runs_make_a_stage_one_after_the_other(tmp_path):
    """Runs of one rank are threads. Whichever is first makes it; the other finds it made."""
    stage, answers, begun = Stage("drawn", {"of": "both"}, tmp_path), [], threading.Barrier(2)

    def work() -> None:
        begun.wait()
        with stage.make_on_all_ranks(toys.ALONE) as is_missing:
            answers.append(is_missing)
            if is_missing:
                assert not stage.is_complete
                (stage.partial / "part").touch()
                time.sleep(0.2)
                assert len(answers) == 1
                stage.finish()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True, False]
    assert [file.name for file in stage.folder.iterdir() if file.name == "part"] == ["part"]


def test_ranks_make_the_folders_that_a_stage_lies_in(tmp_path):
    stage = Stage("drawn", {}, tmp_path / "runs" / "first" / "stages")
    with stage.make_on_all_ranks(toys.ALONE) as is_missing:
        assert is_missing
        stage.finish()
    assert stage.is_complete


def test_a_file_that_its_owner_keeps_to_himself_is_named(tmp_path, monkeypatch):
    """As older versions left them. Nobody is refused anything where tests run as root: the answer is put in."""
    stage = Stage("made", {}, tmp_path)
    with stage.make_on_all_ranks(toys.ALONE):
        (stage.partial / "weights.safetensors").touch()
        stage.finish()
    stage.wait_until_complete()
    monkeypatch.setattr(os, "access", lambda file, mode: Path(file).suffix != ".safetensors")
    with pytest.raises(UserError, match=rf"^cache_dir: {stage.folder}/weights.safetensors is another user's"):
        stage.make_once(True, lambda: pytest.fail("it was made again"))


def test_who_makes_for_all_keeps_the_reason_of_a_failure(tmp_path):
    """A full disk is one line and a bug has its traceback, as in a process of its own."""

    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "weights")

    with pytest.raises(OSError, match="No space left") as error:
        Stage("made", {}, tmp_path).make_on_main(toys.ALONE, fail)
    assert full_disk(error.value) is not None


def test_columns_grow_on_the_disk_and_leave_nothing_but_tensors(tmp_path):
    folder = tmp_path / "columns"
    parts = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (2, 0, 5)]
    with GrowingTensors(folder) as columns:
        for part in parts:
            columns.append("wide", part)
            columns.append("flags", part[:, 0] > 0)
        columns.append("empty", torch.zeros(0, 4))
        mapped = {name: tensor.clone() for name, tensor in columns.mapped().items()}
        with pytest.raises(AssertionError, match="wide"):
            columns.append("wide", torch.zeros(1, 4))
    assert torch.equal(mapped["wide"], torch.cat(parts))
    assert torch.equal(mapped["flags"], torch.cat(parts)[:, 0] > 0)
    assert mapped["empty"].shape == (0, 4)
    assert not list(Path(folder).iterdir())


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(FileLock, "acquire", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    stage = Stage("toy", {"a": 1}, tmp_path)

    def make() -> None:
        stage.partial.mkdir()
        stage.finish()

    stage.make_once(True, make)
    assert stage.is_complete
    assert "a file system without locks" in capsys.readouterr().out


def test_results_of_other_keys_are_whole_and_of_this_stage(tmp_path):
    def finished(name: str, of: str) -> Path:
        stage = Stage(name, {"of": of}, tmp_path)
        stage.partial.mkdir(parents=True)
        stage.finish()
        return stage.folder

    stage = Stage("drawn", {"of": "this"}, tmp_path)
    others = {finished("drawn", "one"), finished("drawn", "two")}
    finished("drawn", "this")
    finished("encoded", "one")
    # One that is complete and not renamed yet.
    shutil.copytree(next(iter(others)), tmp_path / "drawn-0123456789abcdef.partial")
    (tmp_path / "drawn-unfinished").mkdir()
    assert set(stage.results_of_other_keys) == others


def test_a_key_s_digest_knows_no_order_and_is_the_same_in_every_version(tmp_path):
    """Another one would make every stage anew."""
    key = {"a": 1, "b": {"c": [1, 2], "d": None}}
    assert digest_of(key) == digest_of({"b": {"d": None, "c": [1, 2]}, "a": 1}) != digest_of(key | {"a": 2})
    assert Stage("made", key, tmp_path).folder.name == RECORDED_NAME


RECORDED_NAME = "made-475cfd14cc5eabe1"


def test_a_copy_that_was_interrupted_is_made_anew(tmp_path):
    stage = Stage("made", {}, tmp_path / "one")
    stage.partial.mkdir(parents=True)
    (stage.partial / "content").touch()
    stage.finish()
    begun = tmp_path / "two" / f"{stage.folder.name}.partial"
    begun.mkdir(parents=True)
    (begun / "half").touch()
    stage.copy_into(tmp_path / "two")
    assert {file.name for file in (tmp_path / "two" / stage.folder.name).iterdir()} == {"content", "key.json"}
    assert not begun.exists()
