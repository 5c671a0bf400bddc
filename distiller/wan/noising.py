"""Training samples: x_0 re-noised by draws that depend on (seed, epoch, sample id) alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import Dataset

from distiller import draws
from distiller.data.latents import LatentStore
from distiller.data.order import SampleKey
from distiller.diffusion_config import DiffusionRecipe, Timesteps
from distiller.wan.pipeline import WanFiles
from distiller.wan.text import TextStore


@dataclass(frozen=True)
class DiffusionSample:
    """One training sample, on the CPU; see `DiffusionBatch` for the meaning of each tensor."""

    sample_id: int
    sigma: float
    timestep: float
    noisy: Tensor
    text: Tensor
    negative_text: Tensor
    scale: float | None = None
    velocity: Tensor | None = None
    stored: Tensor | None = None


class NoisedData(Dataset[DiffusionSample]):
    """Indexed by (epoch, sample id). All arithmetic is float32 on the CPU, so it is the same on every machine."""

    def __init__(
        self,
        recipe: DiffusionRecipe,
        files: WanFiles,
        latent_shape: tuple[int, ...],
        store: LatentStore | None,
        text: TextStore,
        rows: list[int],
        negative_row: int,
        empty_row: int,
    ) -> None:
        """`rows[i]` is sample i's row in the text store; `store` None means x_t is pure noise."""
        self._recipe, self._task, self._seed = recipe, recipe.task, recipe.seed
        self._num_timesteps = files.num_train_timesteps
        shift = recipe.task.timesteps.shift
        self._shift = files.scheduler_shift if shift == "auto" else shift
        self._boundary = files.boundary_timestep
        self._latent_shape, self._store, self._text, self._rows = latent_shape, store, text, rows
        self._negative_row, self._empty_row = negative_row, empty_row

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: SampleKey) -> DiffusionSample:
        epoch, sample_id = key
        text = self._text[self._rows[sample_id]]
        negative_text = self._text[self._negative_row]
        if self._task.targets == "stored":
            return self._stored_sample(epoch, sample_id, text, negative_text)
        dropout = self._task.condition_dropout
        if dropout and draws.uniform(self._seed, epoch, sample_id, "condition") < dropout:
            text = self._text[self._empty_row]
        sigma = draw_sigma(self._task.timesteps, self._shift, self._seed, epoch, sample_id)
        noise = draws.noise(self._seed, epoch, sample_id, self._latent_shape)
        noisy, velocity = noise, None
        if self._store is not None:
            latents = self._store.latents(sample_id)
            noisy = (1 - sigma) * latents + sigma * noise
            velocity = noise - latents if self._task.losses.true_data.weight else None
        timestep = sigma * self._num_timesteps
        return DiffusionSample(
            sample_id, sigma, timestep, noisy, text, negative_text, self._scale(epoch, sample_id, timestep), velocity
        )

    def _stored_sample(self, epoch: int, sample_id: int, text: Tensor, negative_text: Tensor) -> DiffusionSample:
        assert self._store is not None and self._store.timesteps is not None
        timesteps = self._store.timesteps
        step = math.floor(draws.uniform(self._seed, epoch, sample_id, "step") * len(timesteps))
        noisy, stored = self._store.trajectory_point(sample_id, step)
        timestep = timesteps[step].item()
        sigma = timestep / self._num_timesteps
        return DiffusionSample(sample_id, sigma, timestep, noisy, text, negative_text, stored=stored)

    def _scale(self, epoch: int, sample_id: int, timestep: float) -> float | None:
        guidance = self._task.guidance
        if isinstance(guidance.scale, tuple):
            low, high = guidance.scale
            return low + (high - low) * draws.uniform(self._seed, epoch, sample_id, "guidance")
        if guidance.scale_2 is not None and self._boundary is not None and timestep < self._boundary:
            return guidance.scale_2
        return guidance.scale


def draw_sigma(timesteps: Timesteps, shift: float, seed: int, epoch: int, sample_id: int) -> float:
    """The noise level of a sample, in (0, 1): 0 is clean.

    `uniform`; or `logit_normal`, sigmoid(mean + std * normal) (Esser et al. 2024, arXiv 2403.03206, section 3.1); then
    the resolution shift of their section 5.3.2: shift * sigma / (1 + (shift - 1) * sigma).
    """
    if timesteps.sampling == "uniform":
        sigma = draws.uniform(seed, epoch, sample_id, "sigma")
    else:
        value = timesteps.logit_mean + timesteps.logit_std * draws.normal(seed, epoch, sample_id, "sigma")
        sigma = 1 / (1 + math.exp(-value))
    # The end points are outside every model's schedule; float32 timesteps must not round to them either.
    sigma = min(max(sigma, 1e-4), 1 - 1e-4)
    return shift * sigma / (1 + (shift - 1) * sigma)
