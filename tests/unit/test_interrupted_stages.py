"""Prompts and pictures whose encoding was cut short: what was made is kept, and the end is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from distiller.config.teacher import Teacher
from distiller.diffusion import text
from distiller.diffusion.families import find_pipeline
from distiller.diffusion.text import TextStore, encode_prompts, text_stage
from distiller.diffusion.vae import encode_images
from distiller.storage.stages import Stage
from tests import toy_pictures

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
CPU = torch.device("cpu")
PROMPTS = ["red", "a red cat", "a blue bird sits", "cat", "a red bird sits", "bird", "a dog"]


class CutShortError(Exception):
    pass


def counted(call: Callable[..., Any], limit: int | None, sizes: list[int]) -> Callable[..., Any]:
    """Appends the length of each call's second argument; the call after so many raises CutShortError."""

    def counting(*arguments: Any) -> Any:
        if limit is not None and len(sizes) == limit:
            raise CutShortError
        sizes.append(len(arguments[-2] if len(arguments) > 1 else arguments[0]))
        return call(*arguments)

    return counting


def test_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "SHARD_PROMPTS", 4)
    monkeypatch.setattr(text, "BATCH_PROMPTS", 2)
    pipeline = toy_pictures.make_sd3(tmp_path / "sd3")

    def encode(parent: Path, limit: int | None) -> tuple[Stage, list[int]]:
        family, sizes = find_pipeline(Teacher(path=str(pipeline))), []
        monkeypatch.setattr(family, "embed", counted(family.embed, limit, sizes))
        stage = text_stage(family, PROMPTS, 5, torch.float32, False, parent)
        if limit is None:
            encode_prompts(stage, family, PROMPTS, torch.float32, CPU)
        else:
            with pytest.raises(CutShortError):
                encode_prompts(stage, family, PROMPTS, torch.float32, CPU)
            assert not stage.is_complete
        return stage, sizes

    unbroken, sizes = encode(tmp_path / "a", None)
    assert sizes == [2, 2, 2, 1]
    assert encode(tmp_path / "b", 3)[1] == [2, 2, 2]
    continued, sizes = encode(tmp_path / "b", None)
    # The first four were on the disk; of the next shard a batch was not.
    assert sizes == [2, 1]
    whole, ours = TextStore(unbroken), TextStore(continued)
    assert len(whole) == len(ours) == len(PROMPTS)
    for number in range(len(PROMPTS)):
        assert whole[number].keys() == ours[number].keys()
        assert all(torch.equal(ours[number][name], value) for name, value in whole[number].items())
    assert not [file for file in continued.folder.iterdir() if file.name.startswith(".")]


def test_pictures(tmp_path):
    files = []
    for number in range(5):
        values = np.random.default_rng(number).integers(0, 255, (32, 32, 3), np.uint8)
        Image.fromarray(values).save(tmp_path / f"{number}.png")
        files.append((tmp_path / f"{number}.png", f"picture {number}"))
    family = find_pipeline(Teacher(path=str(toy_pictures.make_sd(tmp_path / "sd"))))

    def encode(parent: Path, limit: int | None) -> tuple[Stage, list[int]]:
        stage, vae, sizes = Stage("images", {}, parent), family.load_vae(CPU), []
        vae.to_latents = counted(vae.to_latents, limit, sizes)
        if limit is None:
            encode_images(stage, files, vae, 32, 32, batch_size=2)
        else:
            with pytest.raises(CutShortError):
                encode_images(stage, files, vae, 32, 32, batch_size=2)
            assert not stage.is_complete
        return stage, sizes

    unbroken, sizes = encode(tmp_path / "a", None)
    assert sizes == [2, 2, 1]
    encode(tmp_path / "b", 2)
    continued, sizes = encode(tmp_path / "b", None)
    assert sizes == [1]
    names = sorted(file.name for file in unbroken.folder.iterdir())
    assert sorted(file.name for file in continued.folder.iterdir()) == names
    for name in names:
        if name.endswith(".safetensors"):
            ours, whole = load_file(continued.folder / name), load_file(unbroken.folder / name)
            assert all(torch.equal(ours[key], value) for key, value in whole.items())
