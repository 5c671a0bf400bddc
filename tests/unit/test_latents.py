"""The digest of latents, which may be too large to read: first, last and evenly spaced parts of each file."""

from __future__ import annotations

import torch
from safetensors.torch import save_file

from distiller.data.latents import DIGEST_RANGE_BYTES, NUM_DIGEST_RANGES, LatentStore


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
