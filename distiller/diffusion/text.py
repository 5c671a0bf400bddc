"""The text stage: prompts are embedded once, before training, so that training needs no text encoder in memory."""

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
from distiller.storage.stage_shards import find_missing_shards, refuse_not_finite, save_atomically
from distiller.storage.stages import Stage, digest_of

FORMAT = 2
"""Version of the layout of the stage's files; part of its key."""
TOKENS, LENGTHS = "tokens", "lengths"
"""Tensors of a shard: the text of its prompts, concatenated to [rows, D], and the rows of each, int64 [prompts]."""
SHARD_PROMPTS = 256
"""Prompts in one file."""
TRY_DTYPE = "set teacher.dtype to float32 or bfloat16"
"""Advice where a model's numbers exceed the range of its dtype, as float16's often do."""
BATCH_PROMPTS = 64
"""Prompts that are embedded at once."""


def text_stage(
    family: Family, prompts: Sequence[str], length: int, dtype: torch.dtype, tf32: bool, folders: Path | StageFolders
) -> Stage:
    """The stage that holds the embeddings of these prompts, in this order.

    Reads the files of text encoders and tokenizers for its key; downloads them from a hub.

    Args:
        length: the result of `Family.text_length`.
        dtype: the text encoder's.
    """
    key: dict[str, Any] = {
        "format": FORMAT,
        "text_encoder": family.files.digest(*family.text_parts),
        "dtype": str(dtype),
        "tf32": tf32,
        "max_sequence_length": length,
        "prompts": digest_of(list(prompts)),
        **family.text_key(),
    }
    return Stage("text", key, folders)


def embedding_key(stage: Stage) -> dict[str, Any]:
    """The part of the stage's key that the embedding of one prompt depends on: without other prompts and the layout."""
    return {name: value for name, value in stage.key.items() if name not in ("prompts", "format")}


def encode_prompts(
    stage: Stage, family: Family, prompts: Sequence[str], dtype: torch.dtype, device: torch.device
) -> None:
    """Encodes the prompts exactly as the pipeline does and finishes the stage. Called by one process of a node.

    Each shard is written when it is done, since embeddings of a large text encoder take megabytes a prompt. Shards of
    an interrupted run are kept.
    """
    length = stage.key["max_sequence_length"]
    shards = [prompts[first : first + SHARD_PROMPTS] for first in range(0, len(prompts), SHARD_PROMPTS)]
    stage.partial.mkdir(parents=True, exist_ok=True)
    missing = find_missing_shards([_shard(stage.partial, index) for index in range(len(shards))])
    pipeline = family.load_text_encoder(dtype, device) if missing else None
    with tqdm(total=len(prompts), desc="encode prompts", unit="prompt", dynamic_ncols=True, leave=False) as bar:
        bar.update(len(prompts) - sum(len(shards[index]) for index in missing))
        for index in missing:
            conditions: list[Condition] = []
            for first in range(0, len(shards[index]), BATCH_PROMPTS):
                batch = shards[index][first : first + BATCH_PROMPTS]
                conditions += [
                    {name: value.cpu() for name, value in condition.items()}
                    for condition in family.embed(pipeline, batch, length)
                ]
                for i, condition in enumerate(conditions[first:], start=index * SHARD_PROMPTS + first + 1):
                    one = {name: value[None] for name, value in condition.items()}
                    refuse_not_finite(one, "the embedding of prompt", i, TRY_DTYPE)
                bar.update(len(batch))
            save_atomically(_tensors_of(conditions), _shard(stage.partial, index))
    stage.finish()


def embed(family: Family, pipeline: Any, prompts: Sequence[str], length: int) -> dict[str, Tensor]:
    """The prompts' conditions [B, ...] as a batch, made by the pipeline of `load_text_encoder` in batches of 64."""
    batches = [prompts[first : first + BATCH_PROMPTS] for first in range(0, len(prompts), BATCH_PROMPTS)]
    return family.stack([condition for batch in batches for condition in family.embed(pipeline, batch, length)], length)


class TextStore:
    """The conditions of the prompts of a finished stage, memory-mapped and without padding."""

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
        """The condition of one prompt, on the CPU."""
        shard, row = divmod(index, SHARD_PROMPTS)
        ends, tensors = self._ends[shard], self._shards[shard]
        start = ends[row - 1] if row else 0
        others = {name: value[row] for name, value in tensors.items() if name != TOKENS}
        return {TEXT: tensors[TOKENS][start : ends[row]], **others}


def _shard(folder: Path, number: int) -> Path:
    return folder / f"text-{number:06d}.safetensors"


def _tensors_of(conditions: Sequence[Condition]) -> dict[str, Tensor]:
    """The tensors of a shard: `TOKENS`, `LENGTHS`, and every other tensor stacked [prompts, ...] under its name."""
    texts = [condition[TEXT] for condition in conditions]
    tensors = {TOKENS: torch.cat(texts), LENGTHS: torch.tensor([len(text) for text in texts])}
    return tensors | {
        name: torch.stack([condition[name] for condition in conditions]) for name in conditions[0].keys() - {TEXT}
    }
