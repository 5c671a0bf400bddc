"""Everything that a run, a cache or an export leaves has the mode that the umask allows."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from distiller import commands
from distiller.commands import caching
from distiller.config.loading import parse
from distiller.errors import UserError
from distiller.storage.file_modes import follow_umask
from distiller.storage.stage_shards import find_missing_shards, save_atomically
from tests import classifiers, toy_causal_lm


@pytest.fixture
def umask(request) -> Iterator[int]:
    """That of somebody who shares with a group, unless a test asks for another one."""
    value = getattr(request, "param", 0o002)
    before = os.umask(value)
    yield value
    os.umask(before)


def wrong_modes(folder: Path, umask: int) -> dict[str, str]:
    """Files, and folders, that are not what `open` and `mkdir` make of this umask."""
    found = {}
    for path in folder.rglob("*"):
        mode, wanted = path.stat().st_mode & 0o777, (0o777 if path.is_dir() else 0o666) & ~umask
        if mode != wanted:
            found[str(path.relative_to(folder))] = oct(mode)
    return found


@pytest.mark.parametrize("umask", [0o002, 0o077], ids=["group", "owner"], indirect=True)
def test_a_folder_and_a_file(tmp_path, umask):
    (tmp_path / "sub").mkdir()
    files = [tmp_path / "a", tmp_path / "sub" / "b"]
    for file in files:
        file.touch()
        file.chmod(0o600 if umask == 0o002 else 0o644)
    follow_umask(tmp_path)
    assert wrong_modes(tmp_path, umask) == {}
    files[0].chmod(0o400)
    follow_umask(files[0])
    assert wrong_modes(tmp_path, umask) == {}


@pytest.mark.parametrize("reason", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EACCES])
def test_a_mode_that_cannot_be_changed_costs_nothing_else(tmp_path, monkeypatch, reason):
    """Another user's file, and file systems without modes."""

    def refuse(path: Path, mode: int) -> None:
        raise OSError(reason, os.strerror(reason), str(path))

    (tmp_path / "a").touch(0o600)
    monkeypatch.setattr(Path, "chmod", refuse)
    follow_umask(tmp_path)


def test_shards_of_an_unfinished_stage_are_the_groups_too(tmp_path, umask, monkeypatch):
    files = [tmp_path / f"{number}.safetensors" for number in range(3)]
    save_atomically({"a": torch.zeros(2)}, files[1])
    assert wrong_modes(tmp_path, umask) == {}
    assert find_missing_shards(files) == [0, 2]
    # Nobody is refused anything where tests run as root.
    monkeypatch.setattr(os, "access", lambda file, mode: False)
    with pytest.raises(UserError, match=r"^cache_dir: .*1.safetensors is another user's and cannot be read"):
        find_missing_shards(files)


def leave_everything(recipe, folder: Path) -> None:
    """A run, its cache, and the export of a checkpoint."""
    commands.train(recipe, resume=False)
    commands.export(Path(recipe.output_dir), None)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    cached = recipe.teacher.model_copy(update={"cache": str(folder / "cached")})
    caching.make_cache(recipe.model_copy(update={"teacher": cached}))


BRIEF = {"max_steps": 1, "batch_size": 8}


def test_of_a_diffusion_run(make_recipe, tmp_path, umask):
    recipe = make_recipe(cache_dir=str(tmp_path / "cache"), train=BRIEF, data={"max_samples": 8})
    leave_everything(recipe, tmp_path)
    for name in ("run", "cache", "cached"):
        assert wrong_modes(tmp_path / name, umask) == {}


def test_of_a_language_run(tmp_path, umask):
    teacher = toy_causal_lm.save_model(tmp_path / "teacher")
    leave_everything(
        parse(toy_causal_lm.recipe(tmp_path, teacher, cache_dir=str(tmp_path / "cache"), train=BRIEF)), tmp_path
    )
    for name in ("run", "cache", "cached"):
        assert wrong_modes(tmp_path / name, umask) == {}


def test_of_a_classifier_whose_teacher_is_trained_first(tmp_path, umask):
    config = classifiers.resnet_config(depths=[1, 1])
    (tmp_path / "teacher").mkdir()
    config.save_pretrained(tmp_path / "teacher")
    (tmp_path / "teacher" / "preprocessor_config.json").write_text(json.dumps(classifiers.PROCESSOR))
    training = {"max_steps": 1, "batch_size": 8}
    data = classifiers.recipe(
        tmp_path, tmp_path / "teacher", classifiers.save_pictures(tmp_path / "p"), config, train=BRIEF
    )
    leave_everything(parse(data | {"teacher_training": training}), tmp_path)
    for name in ("run", "cache", "cached"):
        assert wrong_modes(tmp_path / name, umask) == {}
