"""`AutoencoderKL`, the VAE of Stable Diffusion 1, 2 and 3."""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false, reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from distiller.diffusion.pipeline import PipelineFiles
from distiller.diffusion.vae import Vae


class KlVae(Vae):
    """`AutoencoderKL`, whose latents z are normalised as (z - shift_factor) * scaling_factor. F is 1 in all shapes."""

    def __init__(self, files: PipelineFiles, device: torch.device) -> None:
        super().__init__(device)
        model = AutoencoderKL.from_pretrained(
            files.fetch("vae"), subfolder="vae", dtype=torch.float32, use_safetensors=True, local_files_only=True
        )
        self._model: Any = model.eval().to(device)
        self._factor = self._model.config.scaling_factor
        self._shift = self._model.config.shift_factor or 0.0

    def to_latents(self, pixels: Tensor) -> Tensor:
        latents = self._model.encode(pixels.squeeze(2)).latent_dist.mode()
        return ((latents - self._shift) * self._factor).unsqueeze(2)

    def to_pixels(self, latents: Tensor) -> Tensor:
        return self._model.decode(latents.squeeze(2) / self._factor + self._shift, return_dict=False)[0].unsqueeze(2)


def pixels_of_latent(vae_config: Mapping[str, Any]) -> int:
    """Pixels per latent along each axis: every level of the encoder but the last halves the picture."""
    return 2 ** (len(vae_config.get("block_out_channels", (0,) * 4)) - 1)
