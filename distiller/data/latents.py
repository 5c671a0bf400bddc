"""Latents on disk: safetensors shards and a prompt file. The same format for rollouts, encoded images and users' own.

    FOLDER/prompts.txt            one prompt a line
    FOLDER/NAME.safetensors       "latents" [n, C, F, H, W], normalised as the transformer takes them;
                                  "prompt_index" [n] int64, the line of each sample's prompt (absent: sample i, line i);
                                  rollouts for stored targets add "points" and "predictions" [n, S, C, F, H, W] and
                                  "timesteps" [S]
Samples are numbered across the shards, in the order of the shards' names.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from pathlib import Path
from typing import final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distiller.data.prompts import read_numbered_prompts
from distiller.errors import RunError, UserError
from distiller.storage.packaged_files import search_note

PROMPTS_FILE = "prompts.txt"
NUM_DIGEST_RANGES, DIGEST_RANGE_BYTES = 16, 4096
"""How many evenly spaced ranges of a file, of how many bytes each, its digest is computed from."""


@final
class LatentStore:
    """Reads samples one by one, memory-mapped; opens its files again in every loader process.

    Attributes:
        files: in the order of their samples.
    """

    def __init__(self, folder: Path) -> None:
        """Reads and checks the files' headers. Raises UserError."""
        if not os.path.isdir(folder):
            raise UserError(
                f"data.path: {folder} is not a folder{search_note(folder)}; data.kind=latents needs one with "
                f"{PROMPTS_FILE} and safetensors"
            )
        self.folder = folder
        self.prompts = read_numbered_prompts(folder / PROMPTS_FILE)
        self.files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("."))
        if not self.files:
            raise UserError(f"data.path: {folder} holds no .safetensors file; put the tensor 'latents' into one")
        self._ends: list[int] = []
        self._prompt_index: list[int] = []
        self.shape: tuple[int, ...] = ()
        self.timesteps: Tensor | None = None
        for file in self.files:
            self._read_header(file)
        if not len(self):
            raise UserError(f"data.path: {folder} holds 0 latents; give at least as many as one update takes")
        last = max(self._prompt_index)
        if last >= len(self.prompts):
            raise UserError(
                f"data.path: {folder} has {len(self.prompts)} prompts and latents for line {last + 1}; write one "
                f"prompt a line into {PROMPTS_FILE}"
            )
        self._open: dict[tuple[int, Path], safe_open] = {}

    def __len__(self) -> int:
        return self._ends[-1]

    def digest(self) -> str:
        """Of the files' names and sizes and a sample of their content, since they may be large."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            size = file.stat().st_size
            digest.update(f"{file.name}:{size};".encode())
            with file.open("rb") as stream:
                for i in range(NUM_DIGEST_RANGES):
                    stream.seek(max(0, size - DIGEST_RANGE_BYTES) * i // (NUM_DIGEST_RANGES - 1))
                    digest.update(stream.read(DIGEST_RANGE_BYTES))
        return digest.hexdigest()

    def prompt_index(self, sample_id: int) -> int:
        """The line of the sample's prompt, from 0."""
        return self._prompt_index[sample_id]

    def latents(self, sample_id: int) -> Tensor:
        """x_0 of a sample: [C, F, H, W] float32. Raises RunError if its file cannot be read."""
        return self._read(sample_id, "latents")

    def trajectory_point(self, sample_id: int, step: int) -> tuple[Tensor, Tensor]:
        """(x_t, prediction) of a stored trajectory's step: each [C, F, H, W] float32."""
        return self._read(sample_id, "points", step), self._read(sample_id, "predictions", step)

    def _read(self, sample_id: int, name: str, *axes: int) -> Tensor:
        shard = bisect_right(self._ends, sample_id)
        row = sample_id - (self._ends[shard - 1] if shard else 0)
        file = self.files[shard]
        try:
            part = self._handle(file).get_slice(name)
            return part[(slice(row, row + 1), *(slice(axis, axis + 1) for axis in axes))].reshape(self.shape).float()
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"{file} can no longer be read ({error}); restore it, then continue with --resume"
            ) from error

    def _handle(self, file: Path) -> safe_open:
        key = (os.getpid(), file)
        if key not in self._open:
            self._open[key] = safe_open(file, framework="pt")
        return self._open[key]

    def _read_header(self, file: Path) -> None:
        try:
            with safe_open(file, framework="pt") as handle:
                names = set(handle.keys())
                if "latents" not in names:
                    raise UserError(
                        f"data.path: {file.name} has no tensor 'latents' (found: {', '.join(sorted(names))}); rename it"
                    )
                whole = handle.get_slice("latents").get_shape()
                if len(whole) != 5:
                    raise UserError(f"data.path: {file.name} has latents of shape {whole}, not [n, C, F, H, W]")
                count, *shape = whole
                if self.shape and self.shape != tuple(shape):
                    raise UserError(f"data.path: {file.name} has latents of shape {shape}, others {list(self.shape)}")
                self.shape = tuple(shape)
                first = self._ends[-1] if self._ends else 0
                index = (
                    handle.get_tensor("prompt_index") if "prompt_index" in names else torch.arange(first, first + count)
                )
                if index.shape != (count,) or index.dtype != torch.int64 or (index < 0).any():
                    raise UserError(
                        f"data.path: {file.name} has {count} latents and a prompt_index of shape {list(index.shape)} "
                        f"and type {index.dtype}; give one int64, from 0, for each of the latents"
                    )
                if "timesteps" in names:
                    self.timesteps = handle.get_tensor("timesteps")
        except (OSError, SafetensorError) as error:
            raise UserError(f"data.path: {file} is not a complete safetensors file ({error})") from error
        self._prompt_index += index.tolist()
        self._ends.append(first + count)
