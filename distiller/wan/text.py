"""Prompts become text embeddings once, before training; then the text encoder leaves memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import WanPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from diffusers.utils import is_ftfy_available
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from distiller.stages import Stage, digest_of
from distiller.wan.pipeline import WanFiles
from distiller.wan.short_text import NUM_KEPT_ROWS

EMBEDS_FILE = "embeds.safetensors"


def text_stage(
    files: WanFiles, prompts: Sequence[str], max_sequence_length: int, dtype: torch.dtype, tf32: bool, parent: Path
) -> Stage:
    """The stage that holds the embeddings of these prompts, in this order. Reads the encoder's files for its key."""
    key = {
        "text_encoder": files.digest("text_encoder", "tokenizer"),
        "dtype": str(dtype),
        "tf32": tf32,
        "max_sequence_length": max_sequence_length,
        "prompts": digest_of(list(prompts)),
        "cleaned_by_ftfy": is_ftfy_available(),
    }
    return Stage("text", key, parent)


def encode_prompts(
    stage: Stage,
    files: WanFiles,
    prompts: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    batch_size: int = 64,
) -> None:
    """Encodes the prompts exactly as the pipeline does and finishes the stage. Called by one process of a node."""
    pipeline = load_text_encoder(files, dtype, device)
    rows: list[Tensor] = []
    starts = range(0, len(prompts), batch_size)
    with tqdm(starts, desc="encode prompts", unit="batch", dynamic_ncols=True, leave=False) as bar:
        for start in bar:
            part = prompts[start : start + batch_size]
            rows += [row.cpu() for row in _encode(pipeline, part, stage.key["max_sequence_length"])]
    stage.partial.mkdir(parents=True, exist_ok=True)
    tensors = {"tokens": torch.cat(rows), "lengths": torch.tensor([len(row) for row in rows])}
    save_file(tensors, stage.partial / EMBEDS_FILE)
    stage.finish()


def load_text_encoder(files: WanFiles, dtype: torch.dtype, device: torch.device) -> WanPipeline:
    """The pipeline with its text encoder and tokenizer only."""
    # Under ZeRO-3 Accelerate tells transformers, whose from_pretrained then partitions every model over the ranks: this
    # one is loaded by one rank alone, which would wait for the others for ever.
    unset_hf_deepspeed_config()
    root = files.fetch("text_encoder", "tokenizer", "scheduler")
    pipeline = WanPipeline.from_pretrained(
        root,
        transformer=None,
        transformer_2=None,
        vae=None,
        dtype=dtype,
        low_cpu_mem_usage=True,
        use_safetensors=True,
        local_files_only=True,
    )
    return pipeline.to(device)


def embed(pipeline: WanPipeline, prompts: Sequence[str], max_sequence_length: int) -> Tensor:
    """The prompts' embeddings as the pipeline makes them, but for surplus zero rows: see `pad_text`."""
    return pad_text(_encode(pipeline, prompts, max_sequence_length), max_sequence_length)


def _encode(pipeline: WanPipeline, prompts: Sequence[str], max_sequence_length: int) -> list[Tensor]:
    """The real tokens of every prompt, [n_i, D].

    The pipeline pads to `max_sequence_length` before the encoder, which masks the padding; here it pads to the longest
    prompt, which gives the same tokens and is an order of magnitude faster for short prompts.
    """
    cleaned = [prompt_clean(prompt) for prompt in prompts]
    tokens = pipeline.tokenizer(cleaned, truncation=True, max_length=max_sequence_length, add_special_tokens=True)
    lengths = [len(ids) for ids in tokens.input_ids]
    with torch.no_grad():
        embeds, _ = pipeline.encode_prompt(
            list(prompts), do_classifier_free_guidance=False, max_sequence_length=max(lengths)
        )
    return [row[:length].clone() for row, length in zip(embeds, lengths, strict=True)]


class TextStore:
    """The encoded prompts of a finished stage: memory-mapped, unpadded."""

    def __init__(self, stage: Stage) -> None:
        self._file = stage.folder / EMBEDS_FILE
        self.max_sequence_length = int(stage.key["max_sequence_length"])
        with safe_open(self._file, framework="pt") as file:
            self._tokens = file.get_tensor("tokens")
            ends = file.get_tensor("lengths").cumsum(0).tolist()
        self._spans = list(zip([0, *ends[:-1]], ends, strict=True))

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> Tensor:
        """The real tokens of one prompt, [n, D]."""
        start, end = self._spans[index]
        return self._tokens[start:end]

    def batch(self, indices: Sequence[int]) -> Tensor:
        """Several prompts as one tensor: see `pad_text`."""
        return pad_text([self[index] for index in indices], self.max_sequence_length)


def pad_text(texts: Sequence[Tensor], max_sequence_length: int) -> Tensor:
    """Stacks [n_i, D] texts to [B, min(max(n) + 2, max_sequence_length), D]; the zero rows stand for all the padding
    that the pipeline would add (`distiller.wan.short_text` weighs them so)."""
    length = min(max(len(text) for text in texts) + NUM_KEPT_ROWS, max_sequence_length)
    padded = texts[0].new_zeros(len(texts), length, texts[0].shape[-1])
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    return padded
