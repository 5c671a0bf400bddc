"""Commands that read a run: which overrides they take, which student they show, and that one rank alone works."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from distiller import commands
from distiller.build import build_task
from distiller.cli import main
from distiller.commands.run_reading import ACCEPTED_KEYS, exported_student, open_run
from distiller.diffusion.task import DiffusionTask
from distiller.errors import UserError
from tests import recipe_keys, toys

FEW = ["evaluation.num_samples=2", "evaluation.batch_size=2", "sampling.num_inference_steps=1"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, pipelines) -> Path:
    """A run of three updates with checkpoints of two of them; tests work on copies."""
    from distiller.config.loading import parse

    folder = tmp_path_factory.mktemp("finished")
    data = toys.recipe(folder, pipelines[1], checkpoint={"every_steps": 2}, train={"max_steps": 3})
    commands.train(parse(data), resume=False)
    return folder / "run"


@pytest.fixture
def run_dir(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_samples_never_overwrite_what_training_drew(run_dir, capsys):
    drawn = (run_dir / "samples.png").read_bytes()
    for number in (1, 2):
        commands.sample(run_dir, FEW[2:], ["a red cat"], 0, None)
        assert capsys.readouterr().out.splitlines()[-1] == str(run_dir / f"samples-{number}.png")
    assert (run_dir / "samples.png").read_bytes() == drawn


@pytest.mark.parametrize(
    ("command", "override"),
    [
        ("evaluate", "optim.lr=3"),
        ("evaluate", "train.max_steps=9"),
        ("evaluate", "output_dir=elsewhere"),
        ("evaluate", "task.losses.prediction.weight=2"),
        ("evaluate", "evaluation.sample_prompts=[a dog]"),
        ("evaluate", "rollout.batch_size=3"),
        ("sample", "seed=3"),
        ("sample", "evaluation.num_samples=3"),
    ],
)
def test_an_override_that_changes_nothing_is_refused(run_dir, capsys, command, override):
    more = ["--prompts", "a red cat"] if command == "sample" else []
    assert main([command, str(run_dir), override, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"distiller: '{override}' changes nothing that {command} does; it may be given sampling.*, "
    )
    assert "max_new_tokens" not in error
    assert "teacher.*" in error


def test_the_keys_that_may_be_given_are_keys_of_recipes():
    assert {key for keys in ACCEPTED_KEYS.values() for key in keys} <= recipe_keys.keys()


def test_an_unfinished_run_is_evaluated_by_its_newest_checkpoint(run_dir, capsys):
    shutil.rmtree(run_dir / "student")
    before = (run_dir / "summary.json").read_bytes()
    commands.evaluate(run_dir, FEW)
    assert "has no student/ yet; this is the student of its newest checkpoint, step-3" in capsys.readouterr().out
    assert (run_dir / "summary.json").read_bytes() == before
    newest = json.loads((run_dir / "evaluation-step-3.json").read_text())
    commands.evaluate(run_dir / "checkpoints" / "step-2", FEW)
    older = json.loads((run_dir / "evaluation-step-2.json").read_text())
    assert older["final_latent_mse"] != newest["final_latent_mse"]
    assert not [path for path in run_dir.iterdir() if path.name.startswith(".student")]


def test_a_checkpoint_of_a_finished_run_gives_the_figures_of_its_student(run_dir):
    commands.evaluate(run_dir, FEW)
    commands.evaluate(run_dir / "checkpoints" / "step-3", FEW)
    finished = json.loads((run_dir / "summary.json").read_text())["evaluation"]
    assert (
        json.loads((run_dir / "evaluation-step-3.json").read_text())["final_latent_mse"] == finished["final_latent_mse"]
    )


def test_a_student_that_is_older_than_the_newest_checkpoint_is_said(run_dir, capsys):
    summary = json.loads((run_dir / "summary.json").read_text())
    (run_dir / "summary.json").write_text(json.dumps(summary | {"steps": 2}))
    commands.sample(run_dir, FEW[2:], ["a red cat"], 0, None)
    assert "student/ is that of step 2" in capsys.readouterr().out


def test_a_run_without_student_and_checkpoint_is_refused(run_dir):
    for name in ("student", "checkpoints"):
        shutil.rmtree(run_dir / name)
    with pytest.raises(UserError, match="has neither student/ nor a checkpoint yet; finish its training"):
        commands.evaluate(run_dir, FEW)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_of_a_launch_reads_the_run(run_dir, tmp_path, capsys, monkeypatch, rank):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for arguments in (
        ["evaluate", str(run_dir), *FEW],
        ["sample", str(run_dir), FEW[2], "--prompts", "a red cat"],
        ["export", str(run_dir)],
        ["recipes"],
        ["configs"],
        ["train", str(run_dir / "recipe.yaml"), f"output_dir={tmp_path / 'other'}", "--check"],
    ):
        assert main(arguments) == 0
        assert bool(capsys.readouterr().out) == (rank == 0), arguments
    assert (run_dir / "student-step-3").exists() == (rank == 0)


def test_a_checkpoint_is_named_from_inside_it_and_by_links(run_dir, tmp_path, monkeypatch):
    scratch = Path(shutil.move(run_dir / "checkpoints", tmp_path / "scratch"))
    shutil.copytree(scratch, run_dir / "checkpoints")
    (run_dir / "checkpoints" / "best").symlink_to("step-2")
    monkeypatch.chdir(run_dir / "checkpoints" / "step-2")
    seen = [open_run(Path("."), "evaluate"), open_run(Path("..", "best"), "evaluate")]
    assert [(run.folder, step_of(run)) for run in seen] == [(run_dir, 2)] * 2
    commands.export(Path("."), None)
    assert (run_dir / "student-step-2" / "config.json").is_file()
    shutil.rmtree(run_dir / "checkpoints")
    # Checkpoints on a faster, or larger, file system.
    (run_dir / "checkpoints").symlink_to(scratch)
    monkeypatch.chdir(run_dir)
    assert open_run(Path("checkpoints", "step-3"), "evaluate").folder == run_dir
    commands.export(run_dir, None)
    assert (run_dir / "student-step-3" / "config.json").is_file()


def step_of(run) -> int | None:
    with exported_student(run, build_task(run.recipe)) as (_, step):
        return step


def test_figures_that_cannot_be_stored_are_printed(run_dir, capsys, monkeypatch):
    def full(file: Path, text: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("distiller.commands.finished_runs.write_durably", full)
    assert main(["evaluate", str(run_dir), *FEW]) == 1
    printed = capsys.readouterr()
    assert "final_latent_mse" in printed.out
    reason = f"distiller: {run_dir}: the figures above cannot be stored (Read-only file system)\n"
    assert printed.err.endswith(reason)


def test_figures_of_a_run_that_was_trained_on_meanwhile_are_not_stored(run_dir, capsys, monkeypatch):
    file, evaluated = run_dir / "summary.json", DiffusionTask.evaluate

    def evaluate_slowly(*arguments: Any) -> dict[str, Any]:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"steps": 9}))
        return evaluated(*arguments)

    monkeypatch.setattr(DiffusionTask, "evaluate", evaluate_slowly)
    commands.evaluate(run_dir, FEW)
    assert "was trained on meanwhile" in capsys.readouterr().out
    assert json.loads(file.read_text())["evaluation"] == {}
    assert json.loads(file.read_text())["steps"] == 9


def test_a_stopped_evaluation_leaves_no_student(run_dir, monkeypatch, capsys):
    shutil.rmtree(run_dir / "student")
    monkeypatch.setattr(DiffusionTask, "evaluate", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert main(["evaluate", str(run_dir), *FEW]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "distiller: stopped by SIGTERM; start it again\n"
    assert not [path for path in run_dir.iterdir() if path.name.startswith(".student")]
