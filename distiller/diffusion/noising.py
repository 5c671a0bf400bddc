"""Training samples: x_0 with added noise, drawn at random as a function of (seed, epoch, sample id) only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from distiller.config.diffusion import DiffusionRecipe, Timesteps
from distiller.data import rng
from distiller.data.latents import LatentStore
from distiller.data.order import SampleKey
from distiller.diffusion.family import Condition
from distiller.diffusion.noise_process import NoiseProcess
from distiller.diffusion.text import TextStore


@dataclass(frozen=True)
class DiffusionSample:
    """One training sample on the CPU. Tensors are those of `DiffusionBatch` without the batch axis.

    `share` is the share of noise by which the loss is weighted (see `NoiseLevel`), `scale` the guidance scale.
    """

    sample_id: int
    share: float
    timestep: float
    noisy: Tensor
    positive: Condition
    negative: Condition
    scale: float | None = None
    data_target: Tensor | None = None
    stored: Tensor | None = None


class NoisedData(Dataset[DiffusionSample]):
    """The training data, indexed by (epoch, sample id). Computed in float32 on the CPU: the same on every machine."""

    def __init__(
        self,
        recipe: DiffusionRecipe,
        process: NoiseProcess,
        boundary_timestep: float | None,
        latent_shape: tuple[int, ...],
        store: LatentStore | None,
        text: TextStore,
        rows: list[int],
        negative_row: int,
        empty_row: int,
    ) -> None:
        """Reads no sample.

        Args:
            boundary_timestep: of a teacher with two experts; see `DiffusionNetwork.boundary_timestep`.
            latent_shape: of one sample.
            store: x_0 of all samples; None means that x_t is pure noise.
            rows: row of each sample's prompt in `text`.
            negative_row: row of the negative prompt in `text`.
            empty_row: row of the empty prompt in `text`, for `task.condition_dropout`.
        """
        self._recipe, self._task, self._seed = recipe, recipe.task, recipe.seed
        self._process, self._boundary = process, boundary_timestep
        shift = recipe.task.timesteps.shift
        self._shift = process.auto_shift if shift == "auto" else shift
        self._least_share = shifted(1 / process.num_train_timesteps, self._shift)
        self._latent_shape, self._store, self._text, self._rows = latent_shape, store, text, rows
        self._negative_row, self._empty_row = negative_row, empty_row

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: SampleKey) -> DiffusionSample:
        epoch, sample_id = key
        positive = self._text[self._rows[sample_id]]
        negative = self._text[self._negative_row]
        if self._task.targets == "stored":
            return self._stored_sample(epoch, sample_id, positive, negative)
        dropout = self._task.condition_dropout
        if dropout and rng.uniform(self._seed, epoch, sample_id, "condition") < dropout:
            positive = self._text[self._empty_row]
        level = self._process.level(draw_noise_share(self._task.timesteps, self._shift, self._seed, epoch, sample_id))
        noise = rng.noise(self._seed, epoch, sample_id, self._latent_shape)
        noisy, data_target = noise, None
        if self._store is not None:
            latents = self._store.latents(sample_id)
            noisy = level.signal * latents + level.noise * noise
            data_target = (
                self._process.data_target(latents, noise, level) if self._task.losses.true_data.weight else None
            )
        # As the network gets it: which expert predicts and by which scale it is guided are decided by the same number.
        timestep = torch.tensor(level.timestep, dtype=torch.float32).item()
        scale = self._scale(epoch, sample_id, timestep)
        return DiffusionSample(
            sample_id,
            # As small as diffusers' weightings ever see it: the inverse square of less would outweigh a whole update.
            max(level.share, self._least_share),
            timestep,
            noisy,
            positive,
            negative,
            scale=scale,
            data_target=data_target,
        )

    def _stored_sample(self, epoch: int, sample_id: int, positive: Condition, negative: Condition) -> DiffusionSample:
        """A random step of the sample's stored trajectory, with the teacher's prediction at this step."""
        assert self._store is not None and self._store.timesteps is not None
        timesteps = self._store.timesteps
        step = math.floor(rng.uniform(self._seed, epoch, sample_id, "step") * len(timesteps))
        noisy, stored = self._store.trajectory_point(sample_id, step)
        timestep = timesteps[step].item()
        share = self._process.share_of(timestep)
        return DiffusionSample(sample_id, share, timestep, noisy, positive, negative, stored=stored)

    def _scale(self, epoch: int, sample_id: int, timestep: float) -> float | None:
        """The guidance scale of the sample's target; None without guidance."""
        guidance = self._task.guidance
        if isinstance(guidance.scale, tuple):
            low, high = guidance.scale
            return low + (high - low) * rng.uniform(self._seed, epoch, sample_id, "guidance")
        if guidance.scale_2 is not None and self._boundary is not None and timestep < self._boundary:
            return guidance.scale_2
        return guidance.scale


def draw_noise_share(timesteps: Timesteps, shift: float, seed: int, epoch: int, sample_id: int) -> float:
    """The share of noise of a sample, in (0, 1): 0 is clean. For flow matching it is sigma.

    It is drawn from a uniform distribution, or with `logit_normal` as sigmoid(mean + std * normal) (Esser et al. 2024,
    arXiv 2403.03206, section 3.1). Then the resolution shift of that paper's section 5.3.2 is applied:
    shift * sigma / (1 + (shift - 1) * sigma).
    """
    if timesteps.sampling == "uniform":
        sigma = rng.uniform(seed, epoch, sample_id, "sigma")
    else:
        value = timesteps.logit_mean + timesteps.logit_std * rng.normal(seed, epoch, sample_id, "sigma")
        # Far below -700 exp overflows; the clamp below gives the same result for all such values.
        sigma = 1 / (1 + math.exp(-max(value, -700.0)))
    # 0 and 1 are outside every model's schedule, and float32 timesteps must not be rounded to them either.
    sigma = min(max(sigma, 1e-4), 1 - 1e-4)
    return shifted(sigma, shift)


def shifted(sigma: float, shift: float) -> float:
    """The resolution shift; see `draw_noise_share`."""
    return shift * sigma / (1 + (shift - 1) * sigma)
