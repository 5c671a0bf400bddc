"""Checkpoints in one process: what is on the disk, when it is there, and what happens when it cannot be."""

import errno
import hashlib
import json
import os
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from distiller.checkpoint import saving, snapshot, writing
from distiller.checkpoint.format import SessionTotals, dump_progress, parse_progress, rank_file
from distiller.checkpoint.gathering import whole_on_main
from distiller.checkpoint.reading import CheckpointReader, find_damage
from distiller.checkpoint.resuming import check_resumable, latest_step
from distiller.checkpoint.saving import Checkpoints
from distiller.checkpoint.schedule import is_due, is_time, most_at_once
from distiller.checkpoint.snapshot import Snapshot
from distiller.config.recipe import Checkpoint
from distiller.errors import AgreedError, UserError
from distiller.student_state.base import Piece
from distiller.student_state.moving_average import MovingAverage
from tests.toy_state import IDENTITY, ToyState
from tests.toys import ALONE

CPU = torch.device("cpu")


def checkpoints(folder: Path, state: ToyState, keep: int = 2, average: MovingAverage | None = None) -> Checkpoints:
    return Checkpoints(folder, ALONE, keep, IDENTITY, state, average)


@pytest.fixture
def state() -> ToyState:
    state = ToyState(0, 1, value=3.0)
    state.updates = 4
    return state


@pytest.mark.parametrize("buffer_bytes", [16, 100, 4096])
def test_a_snapshot_is_a_safetensors_file_wherever_its_buffers_end(tmp_path, buffer_bytes):
    values = {"a": torch.arange(37.0), "b": torch.arange(5), "c": torch.arange(3.0).to(torch.bfloat16)}
    shot = Snapshot(CPU, buffer_bytes)
    for _ in range(2):
        shot.take(("weights", Piece(name, 4, value)) for name, value in values.items())
    held = shot.held_bytes
    written = shot.write(tmp_path / "file.safetensors")
    assert written.num_bytes == (tmp_path / "file.safetensors").stat().st_size
    assert shot.held_bytes == held < shot.num_bytes + buffer_bytes
    found = load_file(tmp_path / "file.safetensors")
    assert {key: value.tolist() for key, value in found.items()} == {
        f"weights/{name}:4": value.tolist() for name, value in values.items()
    }


def test_pageable_memory_serves_where_none_can_be_locked(monkeypatch, capsys):
    monkeypatch.setattr(snapshot, "_page_locked", Mock(side_effect=RuntimeError("CUDA error: out of memory\nmore")))
    shot = Snapshot(torch.device("cuda"), buffer_bytes=64)
    shot.reserve(200)
    assert shot.held_bytes == 256
    said = capsys.readouterr().err
    assert "(CUDA error: out of memory)" in said
    assert said.count("\n") == 1


def test_what_is_saved_is_loaded_and_old_ones_go(tmp_path, state):
    average = MovingAverage(state, 0.5)
    ours = checkpoints(tmp_path, state, average=average)
    (tmp_path / "checkpoints" / ".step-1.partial").mkdir(parents=True)
    ours.remove_stale()
    for step in (2, 4, 6):
        state.fill(step)
        average.update(torch.zeros(()))
        ours.save(step, skipped_steps=1)
    ours.finish()
    folder = tmp_path / "checkpoints"
    assert sorted(os.listdir(folder)) == ["latest", "step-4", "step-6"]
    assert sorted(os.listdir(folder / "step-6")) == ["progress.json", rank_file(0, 1)]
    assert (folder / "latest").read_text() == "step-6"
    assert latest_step(tmp_path) == 6
    fresh = ToyState(0, 1)
    fresh_average = MovingAverage(fresh, 0.5)
    assert checkpoints(tmp_path, fresh, average=fresh_average).load(6) == 1
    assert fresh.updates == 4
    assert all(torch.equal(value, state.tensors[key]) for key, value in fresh.tensors.items() if key[1] != "count")
    for ours_piece, theirs in zip(fresh_average.pieces(), average.pieces(), strict=True):
        assert torch.equal(ours_piece.values, theirs.values)


def test_training_goes_on_while_threads_write(tmp_path, state, monkeypatch):
    """What changes after `save` is not in the checkpoint, and there is none until the write has ended."""
    go_on, write = threading.Event(), Snapshot.write
    monkeypatch.setattr(Snapshot, "write", lambda self, file: (go_on.wait(60), write(self, file))[1])
    ours = checkpoints(tmp_path, state)
    ours.save(2, 0)
    state.fill(99.0)
    assert latest_step(tmp_path) == 0
    go_on.set()
    ours.finish()
    reader = CheckpointReader(tmp_path / "checkpoints" / "step-2")
    assert reader.read("weights", "vector", 1, 3).tolist() == [4.0, 5.0, 6.0]
    assert reader.read("exp_avg_sq", "wide", 76, 1).tolist() == [179.0]


def fail_once(monkeypatch, code: int) -> None:
    write, calls = Snapshot.write, []

    def failing(self: Snapshot, file: Path) -> object:
        calls.append(file)
        if len(calls) == 1:
            file.write_bytes(b"half of it")
            raise OSError(code, os.strerror(code))
        return write(self, file)

    monkeypatch.setattr(Snapshot, "write", failing)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_save_that_fails_is_said_and_leaves_the_one_before(tmp_path, state, monkeypatch, capsys, code):
    ours = checkpoints(tmp_path, state)
    ours.save(2, 0, wait=True)
    fail_once(monkeypatch, code)
    ours.save(4, 0)
    ours.finish()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"step-4: {os.strerror(code)}" in said
    assert "training goes on" in said
    assert "the newest one is step-2" in said
    assert ("bytes are needed and" in said) == (code != errno.EIO)
    assert ours.num_failed == 1
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-2"]
    ours.save(6, 0, wait=True)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-2", "step-6"]


def test_a_failed_save_leaves_nothing_although_another_rank_wrote_while_it_was_removed(tmp_path, state, monkeypatch):
    """The folder of a file that appears meanwhile stays."""
    fail_once(monkeypatch, errno.EIO)
    remove, main_thread = shutil.rmtree, threading.current_thread()

    def remove_unless_in_a_thread(folder: Path, ignore_errors: bool = False) -> None:
        if threading.current_thread() is main_thread:
            remove(folder, ignore_errors=ignore_errors)

    monkeypatch.setattr(writing.shutil, "rmtree", remove_unless_in_a_thread)
    ours = checkpoints(tmp_path, state)
    ours.save(2, 0)
    ours.finish()
    assert os.listdir(tmp_path / "checkpoints") == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC])
def test_a_file_system_that_fails_as_a_whole_keeps_nobody_waiting(tmp_path, state, monkeypatch, capsys, code):
    """Writing, removing and asking for room all fail: the main thread hears of it, and the next save works."""
    ours = checkpoints(tmp_path, state)
    room = namedtuple("usage", "total used free")(10**9, 0, 10**9)
    with monkeypatch.context() as patch:
        fail_always = Mock(side_effect=OSError(code, os.strerror(code)))
        patch.setattr(Snapshot, "write", fail_always)
        patch.setattr(writing, "write_durably", fail_always)
        patch.setattr(Path, "unlink", fail_always)
        # The first answer is for the check before anything is written.
        patch.setattr(writing.shutil, "disk_usage", Mock(side_effect=[room, *[fail_always.side_effect] * 9]))
        ours.save(2, 0)
        ours.finish()
    said = capsys.readouterr().err
    assert f"step-2: {os.strerror(code)}" in said
    assert said.count("\n") == 1
    ours.save(4, 0, wait=True)


def test_a_failure_that_is_no_file_s_is_said_too(tmp_path, state, monkeypatch):
    monkeypatch.setattr(Snapshot, "write", Mock(side_effect=KeyError("a dtype")))
    with pytest.raises(AgreedError, match=r"step-2: KeyError: 'a dtype'"):
        checkpoints(tmp_path, state).save(2, 0, wait=True)


def test_the_last_save_ends_the_run_where_it_fails(tmp_path, state, monkeypatch, capsys):
    ours = checkpoints(tmp_path, state)
    fail_once(monkeypatch, errno.ENOSPC)
    with pytest.raises(AgreedError, match=r"step-2: No space left .* bytes are needed and .* there is none yet"):
        ours.save(2, 0, wait=True)
    assert capsys.readouterr().err == ""


def test_nothing_is_written_to_a_disk_that_is_too_full(tmp_path, state, monkeypatch, capsys):
    usage = namedtuple("usage", "total used free")(10, 0, 10)
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(Snapshot, "write", lambda self, file: pytest.fail("it was written"))
    ours = checkpoints(tmp_path, state)
    ours.save(2, 0)
    ours.finish()
    assert "the disk is full" in capsys.readouterr().err
    assert os.listdir(tmp_path / "checkpoints") == []
    assert ours.num_failed == 1


def test_no_run_dir_can_be_written(tmp_path, state, capsys):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    ours = checkpoints(tmp_path, state)
    ours.save(2, 0)
    assert "step-2: Not a directory" in capsys.readouterr().err


def test_damage_is_found_by_digests(tmp_path, state):
    checkpoints(tmp_path, state).save(2, 0, wait=True)
    folder = tmp_path / "checkpoints" / "step-2"
    progress = CheckpointReader(folder).progress
    assert find_damage(folder, progress, 0, 1) is None
    file = folder / rank_file(0, 1)
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    assert "its content is not what was written" in (find_damage(folder, progress, 0, 1) or "")
    assert find_damage(folder, progress, 1, 2) is None
    file.write_bytes(content[:-1])
    assert f"has {len(content) - 1} bytes and had {len(content)}" in (find_damage(folder, progress, 0, 1) or "")


def digest_of_progress(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def test_a_changed_progress_file_is_damaged(tmp_path, state):
    checkpoints(tmp_path, state).save(2, 0, wait=True)
    file = tmp_path / "checkpoints" / "step-2" / "progress.json"
    text = file.read_text()
    assert dump_progress(parse_progress(text)) == text
    # Older ones do not tell what was spent.
    older = json.loads(text)
    del older["spent"], older["sha256"]
    older["sha256"] = digest_of_progress(older)
    assert parse_progress(json.dumps(older)).spent == SessionTotals()
    with pytest.raises(ValueError, match="digest"):
        parse_progress(text.replace('"step": 2', '"step": 3'))
    for other in ("[]", "{}", "", json.dumps(json.loads(text) | {"format": "pieces-2"})):
        file.write_text(other)
        with pytest.raises(UserError, match=r"progress\.json is damaged"):
            CheckpointReader(file.parent)


@pytest.mark.parametrize("is_link", [False, True])
def test_a_checkpoint_under_another_steps_name_is_refused(tmp_path, state, is_link):
    """Resuming and exporting would take step 2's weights for step 8's."""
    checkpoints(tmp_path, state).save(2, 0, wait=True)
    folder = tmp_path / "checkpoints"
    if is_link:
        (folder / "step-8").symlink_to("step-2")
    else:
        shutil.copytree(folder / "step-2", folder / "step-8")
    words = rf"{folder}/step-8 is the checkpoint of step 2, copied or linked under another name"
    with pytest.raises(UserError, match=rf"^--resume: {words}; remove {folder}/step-8 .* continue from .*step-2$"):
        check_resumable(tmp_path, 8, IDENTITY)
    with pytest.raises(UserError, match=words):
        CheckpointReader(folder / "step-8")
    assert check_resumable(tmp_path, 2, IDENTITY).step == 2


def test_pieces_that_leave_a_hole_are_refused(tmp_path, state):
    checkpoints(tmp_path, state).save(2, 0, wait=True)
    shot = Snapshot(CPU)
    shot.take(("weights", piece) for piece in [Piece("vector", 0, torch.zeros(2)), Piece("vector", 3, torch.zeros(2))])
    shot.write(tmp_path / "checkpoints" / "step-2" / rank_file(0, 1))
    with pytest.raises(UserError, match="weights of vector do not cover its 5 elements once"):
        CheckpointReader(tmp_path / "checkpoints" / "step-2")


@pytest.mark.parametrize("cut", [(1, 3), (2, 2)])
def test_any_run_is_read_from_any_number_of_files(tmp_path, cut):
    """Saved by three ranks, each of which has a third of every tensor."""
    states = [ToyState(rank, 3) for rank in range(3)]
    for state in states:
        state.updates = 1
    shots = [Snapshot(CPU) for _ in states]
    folder = tmp_path / "step-1"
    folder.mkdir()
    files = {}
    for rank, (state, shot) in enumerate(zip(states, shots, strict=True)):
        shot.take(("weights", piece) for piece in state.pieces("weights"))
        files[rank_file(rank, 3)] = shot.write(folder / rank_file(rank, 3))
    progress = snapshot_progress(states[0], files)
    (folder / "progress.json").write_text(dump_progress(progress))
    reader = CheckpointReader(folder)
    start, count = cut
    assert reader.read("weights", "vector", start, count).tolist() == [float(start + i) for i in range(count)]
    for first in range(0, 77, 10):
        wanted = list(range(first, 77))
        assert reader.read("weights", "wide", first, 77 - first).tolist() == wanted
    assert dict(reader.whole("weights"))["scalar"].shape == ()
    reader.close()


def snapshot_progress(state: ToyState, files: dict) -> object:
    from distiller.checkpoint.format import Progress

    return Progress(1, 0, state.counters(), IDENTITY, state.shapes, files)


@pytest.mark.parametrize(
    ("settings", "step", "elapsed_s", "due"),
    [
        ({}, 4, 599.0, False),
        ({}, 4, 600.0, True),
        ({"every_minutes": None}, 4, 1e9, False),
        ({"every_steps": 5}, 4, 1e9, False),
        ({}, 10, 0, True),
        ({"at_end": False, "every_steps": 5}, 10, 0, False),
        ({"every_steps": 4}, 4, 0, True),
        ({"every_steps": 4}, 5, 0, False),
        ({"every_minutes": 0.5}, 5, 29.9, False),
        ({"every_minutes": 0.5}, 5, 30.0, True),
        ({"every_minutes": 30.0, "every_steps": 4}, 8, 1.0, True),
    ],
)
def test_when_a_checkpoint_is_due(settings, step, elapsed_s, due):
    checkpoint = Checkpoint(**settings)
    assert is_due(checkpoint, step, 10, is_time(checkpoint, elapsed_s)) is due


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"keep": 3}, 4),
        ({"keep": 3, "every_steps": 5}, 4),
        ({"keep": 3, "every_minutes": None}, 1),
        ({"keep": 3, "every_minutes": None, "at_end": False}, 0),
    ],
)
def test_how_many_checkpoints_are_there_at_once(settings, count):
    assert most_at_once(Checkpoint(**settings)) == count


def test_the_buffers_size_is_what_the_allocator_gives():
    assert snapshot.BUFFER_BYTES & (snapshot.BUFFER_BYTES - 1) == 0


def test_a_gathered_tensor_is_allocated_once(monkeypatch):
    pieces = [("weights", Piece("a", start, torch.arange(start, start + 4.0))) for start in (0, 4, 8)]
    shot = Snapshot(CPU, 64)
    shot.take(pieces)
    sizes, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: sizes.append(size) or empty(*size, **options))
    whole = whole_on_main(shot, {"a": (3, 4)}, ALONE)
    assert torch.equal(whole["a"], torch.arange(12.0).view(3, 4))
    assert sizes.count((12,)) == 1


def test_a_rank_that_fails_by_itself_lets_its_write_end(tmp_path, state, monkeypatch):
    write = Snapshot.write
    monkeypatch.setattr(Snapshot, "write", lambda self, file: (time.sleep(0.2), write(self, file))[1])
    ours = checkpoints(tmp_path, state)
    ours.wait_for_writer(60)
    ours.save(2, 0)
    ours.wait_for_writer(60)
    assert latest_step(tmp_path) == 2


def test_links_to_checkpoints_elsewhere_are_removed_and_what_they_lead_to_stays(tmp_path, state):
    ours, folder = checkpoints(tmp_path, state), tmp_path / "checkpoints"
    ours.save(2, 0, wait=True)
    elsewhere = (folder / "step-2").rename(tmp_path / "moved")
    (folder / "step-2").symlink_to(elsewhere)
    (folder / ".step-1.removed.partial").symlink_to(elsewhere)
    ours.remove_stale()
    for step in (4, 6):
        ours.save(step, 0, wait=True)
    assert sorted(os.listdir(folder)) == ["latest", "step-4", "step-6"]
    assert (elsewhere / "progress.json").is_file()
