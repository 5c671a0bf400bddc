"""Prompts become conditions once, before training; then what embeds them leaves memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from distiller.diffusion.family import TEXT, Condition, Family
from distiller.raw_columns import RawColumns
from distiller.stages import Stage, digest_of

EMBEDS_FILE = "embeds.safetensors"
TOKENS, LENGTHS = "tokens", "lengths"
"""Names in the file of all prompts' text, one after the other, and of how many rows each has."""


def text_stage(
    family: Family, prompts: Sequence[str], length: int, dtype: torch.dtype, tf32: bool, parent: Path
) -> Stage:
    """The stage that holds the embeddings of these prompts, in this order. Reads the encoder's files for its key."""
    key: dict[str, Any] = {
        "text_encoder": family.files.digest(*family.text_parts),
        "dtype": str(dtype),
        "tf32": tf32,
        "max_sequence_length": length,
        "prompts": digest_of(list(prompts)),
        **family.text_key(),
    }
    return Stage("text", key, parent)


def encode_prompts(
    stage: Stage,
    family: Family,
    prompts: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    batch_size: int = 64,
) -> None:
    """Encodes the prompts exactly as the pipeline does and finishes the stage. Called by one process of a node.

    Embeddings go to the disk batch by batch: of a large text encoder they are megabytes a prompt.
    """
    pipeline = family.load_text_encoder(dtype, device)
    starts = range(0, len(prompts), batch_size)
    with (
        RawColumns(stage.partial) as columns,
        tqdm(starts, desc="encode prompts", unit="batch", dynamic_ncols=True, leave=False) as bar,
    ):
        for start in bar:
            for one in family.embed(pipeline, prompts[start : start + batch_size], stage.key["max_sequence_length"]):
                columns.append(LENGTHS, torch.tensor([len(one[TEXT])]))
                columns.append(TOKENS, one[TEXT].cpu())
                for name in one.keys() - {TEXT}:
                    columns.append(name, one[name].cpu().unsqueeze(0))
        save_file(columns.mapped(), stage.partial / EMBEDS_FILE)
    stage.finish()


def embed(family: Family, pipeline: Any, prompts: Sequence[str], length: int) -> dict[str, Tensor]:
    """The prompts' conditions [B, ...] as a batch, made by the pipeline of `load_text_encoder`."""
    return family.stack(family.embed(pipeline, prompts, length), length)


class TextStore:
    """The encoded prompts of a finished stage: memory-mapped, unpadded."""

    def __init__(self, stage: Stage) -> None:
        with safe_open(stage.folder / EMBEDS_FILE, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        self._tokens = tensors.pop(TOKENS)
        ends = tensors.pop(LENGTHS).cumsum(0).tolist()
        self._spans = list(zip([0, *ends[:-1]], ends, strict=True))
        self._others = tensors

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> Condition:
        """What one prompt became; see `Condition`."""
        start, end = self._spans[index]
        return {TEXT: self._tokens[start:end], **{name: value[index] for name, value in self._others.items()}}
