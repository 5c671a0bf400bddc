"""Prompts become conditions once, before training; then what embeds them leaves memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from distiller.diffusion.family import TEXT, Condition, Family
from distiller.storage.stage_folders import StageFolders
from distiller.storage.stage_shards import find_missing_shards, save_atomically
from distiller.storage.stages import Stage, digest_of

FORMAT = 2
"""Of the stage's files; another number is another key."""
TOKENS, LENGTHS = "tokens", "lengths"
"""Names in a shard of its prompts' text, one after the other, and of how many rows each has."""
SHARD_PROMPTS = 256
BATCH_PROMPTS = 64


def text_stage(
    family: Family, prompts: Sequence[str], length: int, dtype: torch.dtype, tf32: bool, places: Path | StageFolders
) -> Stage:
    """The stage that holds the embeddings of these prompts, in this order. Reads the encoder's files for its key."""
    key: dict[str, Any] = {
        "format": FORMAT,
        "text_encoder": family.files.digest(*family.text_parts),
        "dtype": str(dtype),
        "tf32": tf32,
        "max_sequence_length": length,
        "prompts": digest_of(list(prompts)),
        **family.text_key(),
    }
    return Stage("text", key, places)


def embedding_key(stage: Stage) -> dict[str, Any]:
    """Of the stage's key, what a prompt's embedding depends on: not the other prompts, nor the files' layout."""
    return {name: value for name, value in stage.key.items() if name not in ("prompts", "format")}


def encode_prompts(
    stage: Stage, family: Family, prompts: Sequence[str], dtype: torch.dtype, device: torch.device
) -> None:
    """Encodes the prompts exactly as the pipeline does and finishes the stage. Called by one process of a node.

    Embeddings go to the disk shard by shard: of a large text encoder they are megabytes a prompt. An interrupted run
    left whole shards, which are kept.
    """
    length = stage.key["max_sequence_length"]
    shards = [prompts[first : first + SHARD_PROMPTS] for first in range(0, len(prompts), SHARD_PROMPTS)]
    stage.partial.mkdir(parents=True, exist_ok=True)
    missing = find_missing_shards([_shard(stage.partial, number) for number in range(len(shards))])
    pipeline = family.load_text_encoder(dtype, device) if missing else None
    with tqdm(total=len(prompts), desc="encode prompts", unit="prompt", dynamic_ncols=True, leave=False) as bar:
        bar.update(len(prompts) - sum(len(shards[number]) for number in missing))
        for number in missing:
            conditions: list[Condition] = []
            for first in range(0, len(shards[number]), BATCH_PROMPTS):
                batch = shards[number][first : first + BATCH_PROMPTS]
                conditions += [
                    {name: value.cpu() for name, value in one.items()} for one in family.embed(pipeline, batch, length)
                ]
                bar.update(len(batch))
            save_atomically(_tensors_of(conditions), _shard(stage.partial, number))
    stage.finish()


def embed(family: Family, pipeline: Any, prompts: Sequence[str], length: int) -> dict[str, Tensor]:
    """The prompts' conditions [B, ...] as a batch, made by the pipeline of `load_text_encoder`."""
    return family.stack(family.embed(pipeline, prompts, length), length)


class TextStore:
    """The encoded prompts of a finished stage: memory-mapped, unpadded."""

    def __init__(self, stage: Stage) -> None:
        self._shards: list[dict[str, Tensor]] = []
        self._ends: list[list[int]] = []
        while (path := _shard(stage.folder, len(self._shards))).is_file():
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            self._ends.append(tensors.pop(LENGTHS).cumsum(0).tolist())
            self._shards.append(tensors)

    def __len__(self) -> int:
        return sum(map(len, self._ends))

    def __getitem__(self, index: int) -> Condition:
        """What one prompt became; see `Condition`."""
        number, place = divmod(index, SHARD_PROMPTS)
        ends, tensors = self._ends[number], self._shards[number]
        start = ends[place - 1] if place else 0
        others = {name: value[place] for name, value in tensors.items() if name != TOKENS}
        return {TEXT: tensors[TOKENS][start : ends[place]], **others}


def _shard(folder: Path, number: int) -> Path:
    return folder / f"text-{number:06d}.safetensors"


def _tensors_of(conditions: Sequence[Condition]) -> dict[str, Tensor]:
    texts = [one[TEXT] for one in conditions]
    tensors = {TOKENS: torch.cat(texts), LENGTHS: torch.tensor([len(text) for text in texts])}
    return tensors | {name: torch.stack([one[name] for one in conditions]) for name in conditions[0].keys() - {TEXT}}
