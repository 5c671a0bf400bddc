"""Interface of a pipeline's VAE, pixels to latents and back, and the stage that encodes images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from distiller.data.images import load_image
from distiller.data.latents import PROMPTS_FILE
from distiller.storage.stage_shards import find_missing_shards, refuse_not_finite, save_atomically
from distiller.storage.stages import Stage

MAX_POSITIONS = 4096
"""Latent positions (frames x height x width) that are decoded at once: one 512 x 512 picture."""
MAX_PIXELS = 2**20
"""Pixels that are encoded at once: one 1,024 x 1,024 picture, whose first activations take some GiB."""


class Vae(ABC):
    """A pipeline's VAE in float32 on one device. Normalises latents as the pipeline does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def encode(self, pixels: Tensor) -> Tensor:
        """Encodes pixels [B, 3, F, H, W] in [-1, 1], a few samples at a time, since activations take memory.

        Returns:
            normalised latents [B, C, f, h, w], float32 on the VAE's device: the posterior's mode.
        """
        parts = pixels.split(max(1, MAX_PIXELS // pixels[0, 0].numel()))
        with torch.no_grad():
            return torch.cat([self.to_latents(part.to(self._device)) for part in parts])

    def decode(self, latents: Tensor) -> np.ndarray:
        """Decodes normalised latents [B, C, f, h, w] to uint8 [B, F, H, W, 3], a few samples at a time."""
        positions = latents[0, 0].numel()
        return np.concatenate([self._decode(part) for part in latents.split(max(1, MAX_POSITIONS // positions))])

    def _decode(self, latents: Tensor) -> np.ndarray:
        with torch.no_grad():
            video = self.to_pixels(latents.to(self._device))
        video = (video / 2 + 0.5).clamp(0, 1)
        return (video * 255).round().permute(0, 2, 3, 4, 1).byte().cpu().numpy()

    @abstractmethod
    def to_latents(self, pixels: Tensor) -> Tensor:
        """What `encode` returns, for pixels on the VAE's device; called without gradients."""

    @abstractmethod
    def to_pixels(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, F, H, W], about in [-1, 1], of latents on the VAE's device; called without gradients."""


def encode_images(
    stage: Stage, images: Sequence[tuple[Path, str]], vae: Vae, height: int, width: int, batch_size: int = 16
) -> None:
    """Encodes images into a latent store (see `distiller.data.latents`) and finishes the stage.

    Called by one process of a node. Shards of an interrupted run are kept.

    Args:
        images: (file, caption) of each; scaled and cut to `height` x `width` pixels.

    Raises:
        RunError: an image cannot be read.
    """
    stage.partial.mkdir(parents=True, exist_ok=True)
    count = -(-len(images) // batch_size)
    shards = [stage.partial / f"images-{index:06d}.safetensors" for index in range(count)]
    missing = find_missing_shards(shards)
    with tqdm(
        missing,
        total=count,
        initial=count - len(missing),
        desc="encode images",
        unit="batch",
        dynamic_ncols=True,
        leave=False,
    ) as bar:
        for index in bar:
            image_ids = range(index * batch_size, min((index + 1) * batch_size, len(images)))
            pixels = torch.stack([load_image(images[i][0], height, width) for i in image_ids]).unsqueeze(2)
            tensors = {"latents": vae.encode(pixels).cpu().contiguous(), "prompt_index": torch.tensor(list(image_ids))}
            latents = {"latents": tensors["latents"]}
            refuse_not_finite(latents, "the VAE's latent of image", image_ids.start, "look at this image")
            save_atomically(tensors, shards[index])
    captions = "".join(f"{caption}\n" for _, caption in images)
    (stage.partial / PROMPTS_FILE).write_text(captions, encoding="utf-8")
    stage.finish()
