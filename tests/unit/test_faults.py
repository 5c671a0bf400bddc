"""What goes wrong while a run goes on, in one process: data that disappears, and every metric that must be there."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import arbitrary_address
from pathlib import Path

import pytest
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Dataset

from distiller import cli, commands, draws
from distiller.data.latents import LatentStore
from distiller.data.loading import batches_of
from distiller.errors import RunError, UserError
from distiller.process import settle_loader_worker
from distiller.recipe_file import dump
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
        save_file({"latents": draws.noise(1, 0, number, (1, 4, 1, 4, 4))}, folder / f"{number:02d}.safetensors")
    toys.write_prompts(folder / "prompts.txt", toys.PROMPTS[:16])
    return folder


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_latents_file_that_disappears_is_named_and_checkpoints_stay(make_recipe, tmp_path, latents, num_workers):
    """The file of the last sample to be read goes when the first ones have been."""
    last = draws.sample_order(3, 0, 16)[-1]

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


class _Fatal(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_killed_loader_process_is_one_line():
    loader = DataLoader(_Fatal(), num_workers=1, worker_init_fn=settle_loader_worker)
    with pytest.raises(RunError, match=r"^DataLoader worker \(pid.*\) .*\(a data file that shrank"):
        next(batches_of(loader))


@pytest.mark.parametrize("num_bytes", [75, 76])
def test_loader_processes_are_refused_where_their_sockets_paths_would_be_too_long(make_recipe, monkeypatch, num_bytes):
    """Of 76 bytes: there the workers fail, and the loop would wait for them for ever."""
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        folder = Path(parent, "x" * (num_bytes - len(parent) - 1))
        own = folder / "pymp-12345678"
        own.mkdir(parents=True)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        # As Python keeps it, without the finalizer that would remove it when the test is long over.
        monkeypatch.setattr(multiprocessing.current_process(), "_config", {"tempdir": str(own)})
        is_refused = num_bytes == 76
        with socket.socket(socket.AF_UNIX) as listener:
            with pytest.raises(OSError, match="path too long") if is_refused else contextlib.nullcontext():
                listener.bind(arbitrary_address("AF_UNIX"))
        recipe = make_recipe(train={"max_steps": 1, "num_workers": 2})
        words = rf"num_workers is 2 .* {folder}, has a path of 76 bytes, 1 more than .*; set TMPDIR to a shorter"
        with pytest.raises(UserError, match=words) if is_refused else contextlib.nullcontext():
            commands.check(recipe, None)
        commands.check(make_recipe(train={"max_steps": 1, "num_workers": 0}), None)


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


@pytest.mark.parametrize("name", ["samples.png", "summary.tmp"])
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
