"""What goes wrong while a run goes on, in one process: data that disappears, and every metric that must be there."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from accelerate.state import AcceleratorState, GradientState
from safetensors import SafetensorError
from safetensors.torch import save_file

from distiller import cli, commands
from distiller.checkpoint import saving
from distiller.checkpoint.snapshot import Snapshot
from distiller.commands import caching
from distiller.config.loading import dump
from distiller.data import rng
from distiller.data.latents import LatentStore
from distiller.errors import RunError
from distiller.storage import durable_writes
from tests import toys

# The contract's list; null where one does not apply.
METRICS = {
    *("step", "epoch", "samples", "loss", "loss/prediction", "lr", "grad_norm", "optim/loss_scale"),
    *("optim/skipped_steps", "perf/step_ms", "perf/step_ms_min", "perf/step_ms_max", "perf/teacher_ms"),
    *("perf/student_ms", "perf/optimizer_ms", "perf/data_ms", "perf/samples_per_s", "perf/tokens_per_s", "perf/mfu"),
    *("memory/gpu_peak_gib", "memory/gpu_peak_gib_min", "memory/gpu_peak_gib_max", "memory/teacher_gpu_gib"),
    *("memory/teacher_host_gib", "memory/host_rss_gib"),
}


@pytest.fixture
def latents(tmp_path):
    """A folder of 16 latents, one a file."""
    folder = tmp_path / "latents"
    folder.mkdir()
    for number in range(16):
        save_file({"latents": rng.noise(1, 0, number, (1, 4, 1, 4, 4))}, folder / f"{number:02d}.safetensors")
    toys.write_prompts(folder / "prompts.txt", toys.PROMPTS[:16])
    return folder


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_latents_file_that_disappears_is_named_and_checkpoints_stay(make_recipe, tmp_path, latents, num_workers):
    """The file of the last sample to be read goes when the first ones have been."""
    last = rng.sample_order(3, 0, 16)[-1]

    def train() -> None:
        data = {"kind": "latents", "path": str(latents)}
        train = {"max_steps": 4, "batch_size": 4, "log_every": 1, "num_workers": num_workers}
        recipe = make_recipe(data=data, train=train, checkpoint={"every_steps": 1})
        commands.train(recipe, resume=False)

    opened = LatentStore.latents

    def disappearing(store, sample_id):
        if sample_id == last:
            (latents / f"{last:02d}.safetensors").unlink()
        return opened(store, sample_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LatentStore, "latents", disappearing)
        with pytest.raises(RunError, match=rf"^{latents}/{last:02d}.safetensors can no longer be read \(No such file"):
            train()
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


CHILDREN = """
import multiprocessing, time
from distiller.distributed.process import end_loader_processes
loader, other = (multiprocessing.Process(target=time.sleep, args=(100,), daemon=daemon) for daemon in (True, False))
loader.start()
other.start()
end_loader_processes()
loader.join(20)
print(loader.exitcode, other.is_alive())
other.kill()
"""


def test_a_command_ends_its_loader_processes_and_no_others():
    """A program that calls commands may have children of its own; so have the tests, whose ranks they are."""
    # In a new interpreter: torch handles SIGCHLD where loaders were before. Loader processes are daemonic.
    assert subprocess.check_output([sys.executable, "-c", CHILDREN], text=True).split() == ["-9", "True"]


def test_every_metric_of_the_contract_is_on_every_line(make_recipe):
    recipe = make_recipe(train={"max_steps": 2, "batch_size": 8, "log_every": 1})
    commands.train(recipe, resume=False)
    lines = toys.read_metrics(Path(recipe.output_dir))
    assert len(lines) == 2
    assert all(set(line) >= METRICS for line in lines)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/samples.png"), "run/samples.png: the disk is full; "),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "distiller: the disk is full; "),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "run/a"), "run/a: the disk quota is used up; "),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "distiller: the disk is full; "),
    ],
    ids=["named", "unnamed", "quota", "weights"],
)
def test_a_full_disk_that_nothing_else_caught_is_one_line(capsys, error, words):
    def command(stops):
        raise error

    assert cli.guarded(command) == 1
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.endswith("make room and start again, a training run with --resume\n")
    assert printed.count("\n") == 1


@pytest.mark.parametrize("name", ["samples.png", ".summary.json.tmp"])
def test_a_disk_that_is_full_after_the_loop(make_recipe, tmp_path, monkeypatch, capsys, name):
    """What a device that is always full says, where the run's own file would be written."""
    opened = open

    def full(file, *arguments, **options):
        is_it = isinstance(file, str | os.PathLike) and os.path.basename(file) == name
        return opened("/dev/full" if is_it else file, *arguments, **options)

    monkeypatch.setattr("builtins.open", full)
    monkeypatch.setattr("io.open", full)
    recipe = make_recipe(train={"max_steps": 1})
    assert cli.guarded(lambda stops: commands.train(recipe, resume=False)) == 1
    printed = capsys.readouterr().err
    assert "the disk is full; make room" in printed
    assert "Traceback" not in printed
    monkeypatch.undo()
    assert cli.guarded(lambda stops: commands.train(recipe, resume=True)) == 0


@pytest.fixture
def unsynced(monkeypatch) -> int:
    """A file system that cannot sync folders."""
    sync, code = os.fsync, errno.EINVAL

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return code


@pytest.mark.usefixtures("unsynced")
def test_a_file_system_that_cannot_sync_folders_is_said_once_and_serves(make_recipe, tmp_path, capsys):
    recipe = make_recipe(train={"max_steps": 2, "batch_size": 8}, checkpoint={"every_steps": 1})
    assert cli.guarded(lambda stops: commands.train(recipe, resume=False)) == 0
    printed = capsys.readouterr()
    said = f"note: {tmp_path}/run lies on a file system that does not bring the names in a folder to the disk when"
    assert (printed.out + printed.err).count(said) == 1
    assert "not written" not in printed.out + printed.err
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step-2"
    assert (tmp_path / "run" / "student").is_dir()


@pytest.mark.usefixtures("unsynced")
def test_a_cache_on_such_a_file_system_is_made_and_that_is_said_once(make_recipe, tmp_path, capsys):
    recipe = make_recipe(teacher={"cache": str(tmp_path / "cached")}, train={"max_steps": 1, "batch_size": 8})
    assert cli.guarded(lambda stops: caching.make_cache(recipe)) == 0
    assert capsys.readouterr().out.count(f"note: {tmp_path}/cached lies on a file system") == 1


@pytest.mark.parametrize(
    ("code", "is_none"), [(errno.EOPNOTSUPP, False), (errno.ENOSYS, False), (errno.EIO, True), (errno.ENOSPC, True)]
)
def test_what_fsync_says_of_a_broken_or_full_disk_is_no_missing_feature(tmp_path, monkeypatch, code, is_none):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(code, os.strerror(code))))
    if is_none:
        with pytest.raises(OSError, match=os.strerror(code)):
            durable_writes.sync_folder(tmp_path)
    else:
        assert durable_writes.sync_folder(tmp_path) is False
        assert "does not bring files to the disk" in (durable_writes.missing_durability(tmp_path) or "")
    assert os.listdir(tmp_path) == []


def no_room(monkeypatch) -> None:
    """The disk has room for the student, but not for a checkpoint, which takes three times as much."""
    usage = namedtuple("usage", "total used free")(10**9, 0, 2**20)
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: usage)


def no_memory(monkeypatch) -> None:
    """A snapshot of weights and moments is too large for the host."""
    take = Snapshot.take

    def failing(shot, pieces) -> None:
        pieces = list(pieces)
        if len({kind for kind, _ in pieces}) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        take(shot, pieces)

    monkeypatch.setattr(Snapshot, "take", failing)


def no_writing(monkeypatch) -> None:
    """The disk is full when the bytes are written."""
    monkeypatch.setattr(Snapshot, "write", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))


@pytest.mark.parametrize("ema_decay", [None, 0.9])
@pytest.mark.parametrize("failing", [no_room, no_memory, no_writing])
def test_the_student_is_exported_whatever_happens_to_its_checkpoints(
    make_recipe, tmp_path, monkeypatch, capsys, failing, ema_decay
):
    """And all else that a run leaves; the exit code says that not all of it is there."""
    options = {"train": {"max_steps": 3, "batch_size": 8, "ema_decay": ema_decay}, "cache_dir": str(tmp_path / "cache")}
    healthy = make_recipe(output_dir=str(tmp_path / "healthy"), **options)
    commands.train(healthy, resume=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    recipe = make_recipe(checkpoint={"every_steps": 2}, **options)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        failing(patch)
        assert cli.guarded(lambda stops: commands.train(recipe, resume=False)) == 1
    folder, last = tmp_path / "run", capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"distiller: the checkpoint was not written: {folder}/checkpoints/step-3: ")
    assert last.endswith(f"there is none yet; the student is complete, in {folder}/student")
    toys.assert_same_run(folder, tmp_path / "healthy", 0.0, 0.0)
    assert json.loads((folder / "summary.json").read_text())["failed_saves"] == 2
    assert (folder / "samples.png").is_file()
    assert not list(folder.glob("checkpoints/*"))


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), SafetensorError("no header"), ValueError("a bug")])
def test_other_errors_keep_their_traceback(error):
    def command(stops):
        raise error

    with pytest.raises(type(error)):
        cli.guarded(command)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Python's own handler, which a shell's background jobs start without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("export", ["export", "run"]),
        ("evaluate", ["evaluate", "run"]),
        ("sample", ["sample", "run", "--prompts", "a cat"]),
        ("check", ["train", "recipe.yaml", "--check"]),
    ],
)
def test_an_interrupt_is_one_line_in_commands_that_do_not_listen(
    make_recipe, tmp_path, monkeypatch, capsys, name, arguments
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(dump(make_recipe()))
    monkeypatch.setattr(commands, name, lambda *_: signal.raise_signal(signal.SIGINT))
    assert cli.main(arguments) == 130
    assert capsys.readouterr().err == "distiller: stopped by SIGINT; start it again\n"
