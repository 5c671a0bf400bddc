"""Pixels to latents and back, with the pipeline's own VAE; it is in memory only while it is used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from distiller.data.images import load_image
from distiller.data.latents import PROMPTS_FILE
from distiller.stages import Stage
from distiller.wan.pipeline import WanFiles

MAX_POSITIONS = 4096
"""Latent positions that are decoded at once: one 512 x 512 picture."""


class Vae:
    """The pipeline's VAE in float32, with the latents' normalisation that WanPipeline applies."""

    def __init__(self, files: WanFiles, device: torch.device) -> None:
        root = files.fetch("vae")
        self._model = AutoencoderKLWan.from_pretrained(
            root, subfolder="vae", dtype=torch.float32, use_safetensors=True, local_files_only=True
        )
        self._model = self._model.eval().requires_grad_(False).to(device)
        self._device = device
        shape = (1, self._model.config.z_dim, 1, 1, 1)
        self._mean = torch.tensor(self._model.config.latents_mean, device=device).view(shape)
        self._std = torch.tensor(self._model.config.latents_std, device=device).view(shape)

    def encode(self, pixels: Tensor) -> Tensor:
        """[B, 3, F, H, W] in [-1, 1] -> normalised latents [B, C, f, h, w], float32: the posterior's mode."""
        with torch.no_grad():
            posterior = self._model.encode(pixels.to(self._device)).latent_dist
            return (posterior.mode() - self._mean) / self._std

    def decode(self, latents: Tensor) -> np.ndarray:
        """Normalised latents [B, C, f, h, w] -> uint8 [B, F, H, W, 3]; a few at a time, since pixels take memory."""
        positions = latents[0, 0].numel()
        return np.concatenate([self._decode(part) for part in latents.split(max(1, MAX_POSITIONS // positions))])

    def _decode(self, latents: Tensor) -> np.ndarray:
        with torch.no_grad():
            video = self._model.decode(latents.to(self._device) * self._std + self._mean, return_dict=False)[0]
        video = (video / 2 + 0.5).clamp(0, 1)
        return (video * 255).round().permute(0, 2, 3, 4, 1).byte().cpu().numpy()


def encode_images(
    stage: Stage,
    images: Sequence[tuple[Path, str]],
    files: WanFiles,
    height: int,
    width: int,
    device: torch.device,
    batch_size: int = 16,
) -> None:
    """Encodes images into a latent store and finishes the stage. Called by one process of a node."""
    vae = Vae(files, device)
    stage.partial.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(images), batch_size)
    with tqdm(starts, desc="encode images", unit="batch", dynamic_ncols=True, leave=False) as bar:
        for first in bar:
            part = range(first, min(first + batch_size, len(images)))
            pixels = torch.stack([load_image(images[i][0], height, width) for i in part]).unsqueeze(2)
            tensors = {"latents": vae.encode(pixels).cpu().contiguous(), "prompt_index": torch.tensor(list(part))}
            save_file(tensors, stage.partial / f"images-{first // batch_size:06d}.safetensors")
    captions = "".join(f"{caption}\n" for _, caption in images)
    (stage.partial / PROMPTS_FILE).write_text(captions, encoding="utf-8")
    stage.finish()
