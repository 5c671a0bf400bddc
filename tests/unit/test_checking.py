"""What `train --check` finds out before anything runs, and how far it looks."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from distiller import commands
from distiller.cli import main
from distiller.commands import training_run
from distiller.config.loading import dump, parse
from distiller.errors import UserError
from distiller.storage.weight_files import read_header
from tests import classifiers

FILE = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 1\n"


@pytest.fixture
def images(tmp_path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(10):
        Image.new("RGB", (40, 50), (number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a red cat")
    return folder


def test_a_picture_that_cannot_be_read_is_named(make_recipe, images, capsys):
    recipe = make_recipe(data={"kind": "images", "path": str(images)})
    commands.check(recipe, None)
    assert ", 10 of 10 pictures read" in capsys.readouterr().out
    file = images / "7.png"
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(UserError, match=r"data.path: .*7.png is not a readable image .*; replace or remove it"):
        commands.check(recipe, None)


def test_so_is_one_of_a_classifiers(tmp_path, capsys):
    teacher = classifiers.save_classifier(tmp_path / "teacher", classifiers.resnet_config())
    folder = classifiers.save_pictures(tmp_path / "pictures", 4)
    recipe = parse(classifiers.recipe(tmp_path, teacher, folder, classifiers.resnet_config()))
    commands.check(recipe, None)
    files = sorted(folder.rglob("*.png"))
    assert f", {len(files)} of {len(files)} pictures read" in capsys.readouterr().out
    files[-1].write_bytes(b"")
    with pytest.raises(UserError, match=rf"{files[-1].name} is not a readable image"):
        commands.check(recipe, None)


def test_a_run_that_is_there_may_be_continued_and_not_begun(make_recipe, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    recipe = make_recipe()
    (tmp_path / "run" / "recipe.yaml").write_text(dump(recipe))
    (tmp_path / "mine.yaml").write_text(dump(recipe))
    assert main(["train", str(tmp_path / "mine.yaml"), "--check"]) == 2
    assert "already holds a run; pass --resume" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "mine.yaml"), "--check", "--resume"]) == 0


@pytest.mark.parametrize("key", ["output_dir", "cache_dir"])
def test_a_folder_that_cannot_be_written(make_recipe, tmp_path, monkeypatch, key):
    """root may write anywhere, so that the system's answer is replaced."""
    recipe = make_recipe(**{key: str(tmp_path / "theirs" / "run" / "deep")})
    (tmp_path / "theirs").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "theirs")
    with pytest.raises(UserError, match=rf"{key}: \S+deep cannot be .*theirs: Permission denied"):
        commands.check(recipe, None)
    assert os.listdir(tmp_path / "theirs") == []


def test_a_cache_that_is_there_may_be_read_only(make_recipe, tmp_path, monkeypatch):
    recipe = make_recipe(cache_dir=str(tmp_path / "shared"))
    (tmp_path / "shared").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "shared")
    commands.check(recipe, None)


@pytest.mark.parametrize("gone", ["nothing", "its content", "teacher"])
def test_a_finished_run_needs_neither_its_inputs_nor_a_writable_folder(
    make_recipe, tmp_path, monkeypatch, capsys, fresh, gone
):
    recipe = make_recipe(train={"max_steps": 1, "batch_size": 8})
    teacher = shutil.copytree(recipe.teacher.path, tmp_path / "teacher")
    recipe = recipe.model_copy(update={"teacher": recipe.teacher.model_copy(update={"path": str(teacher)})})
    folder = Path(recipe.output_dir)
    commands.train(recipe, resume=False)
    fresh()
    if gone == "its content":
        config = teacher / "scheduler" / "scheduler_config.json"
        config.write_text(config.read_text() + "\n")
    elif gone == "teacher":
        shutil.rmtree(teacher)
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    commands.check(recipe, None, resume=True)
    commands.train(recipe, resume=True)
    assert capsys.readouterr().out.count("is already finished") == 2
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before
    other = recipe.model_copy(update={"seed": recipe.seed + 1})
    fresh()
    with pytest.raises(UserError, match=r"--resume: seed was"):
        commands.train(other, resume=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has fp16")
def test_fp16_on_a_cpu(make_recipe, tmp_path, capsys):
    recipe = make_recipe(train={"mixed_precision": "fp16"})
    with pytest.raises(UserError, match=r"fp16, which needs a GPU, and this machine has none.*--config_file"):
        commands.check(recipe, None)
    file = tmp_path / "launch.yaml"
    file.write_text(FILE + "use_cpu: true\n")
    with pytest.raises(UserError, match=r"fp16, which needs a GPU, and launch.yaml says use_cpu"):
        commands.check(recipe, str(file))
    file.write_text(FILE + "use_cpu: true\nmixed_precision: fp16\n")
    with pytest.raises(UserError, match=r"fp16, which needs a GPU, and launch.yaml says use_cpu"):
        commands.check(make_recipe(), str(file))
    file.write_text(FILE + "use_cpu: false\n")
    commands.check(recipe, str(file))
    assert "warning: train.mixed_precision is fp16, which needs a GPU" in capsys.readouterr().out


def test_a_dry_run_compares_what_is_kept_with_the_disk(make_recipe, monkeypatch, capsys, fresh):
    saving = {"every_steps": 2, "keep": 1}
    commands.dry_run(make_recipe(checkpoint=saving))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "checkpoint takes" in line]
    assert line.startswith("dry run: a checkpoint takes 1.")
    assert "with the 2 checkpoints that are there at once" in line
    fresh()
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(total=0, used=0, free=2**20))
    commands.dry_run(make_recipe(checkpoint=saving))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "checkpoint takes" in line]
    assert line.startswith("warning: a checkpoint takes 1.")
    assert "1.0 MiB are free where output_dir is; set checkpoint.keep lower" in line


def test_the_bytes_of_a_dry_run_are_those_of_a_checkpoint(make_recipe, monkeypatch, fresh):
    foretold: list[int] = []
    monkeypatch.setattr(
        training_run, "disk_line", lambda recipe, checkpoint, student: foretold.append(checkpoint) or ""
    )
    recipe = make_recipe(train={"max_steps": 1, "ema_decay": 0.9})
    commands.dry_run(recipe)
    fresh()
    commands.train(recipe, resume=False)
    (file,) = Path(recipe.output_dir, "checkpoints", "step-1").glob("*.safetensors")
    # Beside a MiB for headers and notes.
    assert sum(tensor.num_bytes for tensor in read_header(file).values()) == foretold[0] - 2**20
