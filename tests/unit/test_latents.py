"""Samples of several files; the digest, for which first, last and evenly spaced parts of each file are read."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from distiller.data.latents import DIGEST_RANGE_BYTES, NUM_DIGEST_RANGES, LatentStore
from distiller.errors import UserError


def test_the_digest_follows_the_parts_that_are_read(tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\n")
    file = tmp_path / "0.safetensors"
    save_file({"latents": torch.zeros(1, 4, 1, 256, 256)}, file)
    store, size = LatentStore(tmp_path), file.stat().st_size
    assert size > 2 * NUM_DIGEST_RANGES * DIGEST_RANGE_BYTES
    content, before = bytearray(file.read_bytes()), store.digest()
    starts = [(size - DIGEST_RANGE_BYTES) * i // (NUM_DIGEST_RANGES - 1) for i in range(NUM_DIGEST_RANGES)]
    assert starts[-1] == size - DIGEST_RANGE_BYTES
    for start in starts:
        for position in (start, start + DIGEST_RANGE_BYTES - 1):
            changed = content.copy()
            changed[position] ^= 1
            file.write_bytes(changed)
            assert store.digest() != before
    file.write_bytes(content)
    assert store.digest() == before
    file.rename(tmp_path / "1.safetensors")
    assert LatentStore(tmp_path).digest() != before


def test_a_small_file_s_digest_is_the_same_in_every_version(tmp_path):
    """Another one would refuse to resume every run."""
    (tmp_path / "prompts.txt").write_text("a cat\n")
    save_file({"latents": torch.arange(64.0).view(1, 4, 1, 4, 4)}, tmp_path / "0.safetensors")
    assert LatentStore(tmp_path).digest() == RECORDED_DIGEST


RECORDED_DIGEST = "4c1c313f579e355c6a9833fc12b6f826"


def test_samples_are_counted_over_files_and_prompts_by_line(tmp_path):
    """Without `prompt_index` a sample has the prompt of its own number."""
    latents = torch.arange(5 * 64.0).view(5, 4, 1, 4, 4)
    (tmp_path / "prompts.txt").write_text("a\nb\nc\nd\ne\n")
    save_file({"latents": latents[:2].clone()}, tmp_path / "0.safetensors")
    save_file({"latents": latents[2:3].clone(), "prompt_index": torch.tensor([0])}, tmp_path / "1.safetensors")
    save_file({"latents": latents[3:].clone()}, tmp_path / "2.safetensors")
    # As macOS leaves them beside files.
    (tmp_path / "._2.safetensors").write_bytes(b"none")
    store = LatentStore(tmp_path)
    assert len(store) == 5
    assert [store.prompt_index(number) for number in range(5)] == [0, 1, 0, 3, 4]
    assert all(torch.equal(store.latents(number), latents[number]) for number in range(5))
    (tmp_path / "prompts.txt").write_text("a\nb\nc\nd\n")
    with pytest.raises(UserError, match="has 4 prompts and latents for line 5"):
        LatentStore(tmp_path)


def test_a_stored_trajectory_is_read_step_by_step(tmp_path):
    points, predictions = torch.randn(2, 2, 3, 4, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    tensors = {"latents": points[:, 0], "points": points, "predictions": predictions, "timesteps": torch.arange(3)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "0.safetensors")
    store = LatentStore(tmp_path)
    for number in range(2):
        for step in range(3):
            point, prediction = store.trajectory_point(number, step)
            assert torch.equal(point, points[number, step])
            assert torch.equal(prediction, predictions[number, step])
