"""The student out of a checkpoint, where its folder or the disk does not allow it."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from distiller.checkpoint.format import rank_file
from distiller.checkpoint.saving import Checkpoints
from distiller.errors import AgreedError, UserError
from distiller.export import export_checkpoint, export_run
from distiller.storage.weight_files import read_header
from tests.toy_state import IDENTITY, ToyState
from tests.toys import ALONE

FULL = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), SafetensorError("I/O error: No space left on device")]


@pytest.fixture
def run(tmp_path) -> Any:
    checkpoints = Checkpoints(tmp_path, ALONE, 1, IDENTITY, ToyState(0, 1), None)
    checkpoints.save(2, 0, wait=True)
    recipe = SimpleNamespace(output_dir=str(tmp_path))
    return cast(Any, SimpleNamespace(checkpoints=checkpoints, last_step=2, ranks=ALONE, recipe=recipe, task=None))


def half_written(error: Exception) -> Any:
    def export(state: dict[str, torch.Tensor], folder: Path) -> None:
        folder.mkdir()
        (folder / "half.safetensors").write_bytes(b"half of it")
        raise error

    return cast(Any, SimpleNamespace(export=export))


@pytest.mark.parametrize("error", FULL, ids=["OSError", "SafetensorError"])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, run, error):
    before = sorted(os.listdir(tmp_path))
    run.task = half_written(error)
    with pytest.raises(AgreedError, match=r"student: cannot be written \(.*No space left on device\)"):
        export_run(run)
    with pytest.raises(UserError, match=r"--output .*mine: cannot be written \(.*No space left on device\)"):
        export_checkpoint(run.task, tmp_path / "checkpoints" / "step-2", tmp_path / "mine")
    assert sorted(os.listdir(tmp_path)) == before


def test_damage_is_found_before_a_header_is_believed(tmp_path, run):
    folder = tmp_path / "checkpoints" / "step-2"
    file = folder / rank_file(0, 1)
    file.write_bytes(b"\xff" * file.stat().st_size)
    task = cast(Any, SimpleNamespace(export=Mock()))
    with pytest.raises(UserError, match=r"its content is not what was written.*; export another checkpoint"):
        export_checkpoint(task, folder, tmp_path / "mine")
    task.export.assert_not_called()


def test_a_student_that_is_a_link_to_another_disk_is_replaced_by_a_folder(tmp_path, run):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "student").symlink_to(elsewhere)
    run.task = cast(Any, SimpleNamespace(export=lambda state, folder: folder.mkdir()))
    export_run(run)
    assert not (tmp_path / "student").is_symlink()
    assert (tmp_path / "student").is_dir()
    assert elsewhere.is_dir()


def test_a_dtype_that_is_not_read_is_no_damage(tmp_path):
    save_file({"indices": torch.zeros(2, dtype=torch.uint32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"indices is of dtype U32, which is not read"):
        read_header(tmp_path / "model.safetensors")
