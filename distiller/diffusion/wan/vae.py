"""Wan's VAE, whose latents are normalised by channel."""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from distiller.diffusion.pipeline import PipelineFiles
from distiller.diffusion.vae import Vae


class WanVae(Vae):
    """`AutoencoderKLWan`, whose latents z are normalised as (z - latents_mean) / latents_std."""

    def __init__(self, files: PipelineFiles, device: torch.device) -> None:
        super().__init__(device)
        root = files.fetch("vae")
        self._model = AutoencoderKLWan.from_pretrained(
            root, subfolder="vae", dtype=torch.float32, use_safetensors=True, local_files_only=True
        )
        self._model = self._model.eval().to(device)
        shape = (1, self._model.config.z_dim, 1, 1, 1)
        self._mean = torch.tensor(self._model.config.latents_mean, device=device).view(shape)
        self._std = torch.tensor(self._model.config.latents_std, device=device).view(shape)

    def to_latents(self, pixels: Tensor) -> Tensor:
        return (self._model.encode(pixels).latent_dist.mode() - self._mean) / self._std

    def to_pixels(self, latents: Tensor) -> Tensor:
        return self._model.decode(latents * self._std + self._mean, return_dict=False)[0]
