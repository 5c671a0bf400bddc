"""A micro-batch of diffusion samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3
from torch import Tensor

from distiller.diffusion_config import DiffusionOptions
from distiller.wan.network import WanNetwork
from distiller.wan.noising import DiffusionSample
from distiller.wan.text import pad_text


@dataclass(frozen=True)
class DiffusionBatch:
    """One micro-batch. Tensors are float32 unless said; `text` has the text encoder's dtype.

    Attributes:
        noisy: x_t [B, C, F, H, W].
        timesteps: [B] in (0, 1000).
        text: [B, L, D]; `negative_text` [B, L', D] only with guidance.
        weights: [B] of the prediction term.
        scales: [B] guidance scales, with guidance.
        velocity: noise - x_0 [B, C, F, H, W], for the true-data term.
        stored: the trajectory's own predictions [B, C, F, H, W], with stored targets.
        modules: the teacher's module of each sample (host).
    """

    sample_ids: tuple[int, ...]
    modules: tuple[int, ...]
    noisy: Tensor
    timesteps: Tensor
    text: Tensor
    weights: Tensor
    negative_text: Tensor | None = None
    scales: Tensor | None = None
    velocity: Tensor | None = None
    stored: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> DiffusionBatch:
        """The batch with every tensor changed."""
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        return replace(self, **{name: change(value) for name, value in tensors.items()})

    def pin_memory(self) -> DiffusionBatch:
        """Called by the DataLoader: page-locked memory, from which copies to a GPU do not block."""
        return self.map(Tensor.pin_memory)


def collate(samples: Sequence[DiffusionSample], task: DiffusionOptions, network: WanNetwork) -> DiffusionBatch:
    """Stacks samples on the CPU; text is padded to the batch's longest prompt and two zero rows."""
    timesteps = torch.tensor([sample.timestep for sample in samples], dtype=torch.float32)
    sigmas = torch.tensor([sample.sigma for sample in samples], dtype=torch.float32)
    length, weighting = task.max_sequence_length, task.timesteps.weighting
    scales = [sample.scale for sample in samples if sample.scale is not None]
    return DiffusionBatch(
        sample_ids=tuple(sample.sample_id for sample in samples),
        modules=network.route(timesteps.tolist()),
        noisy=torch.stack([sample.noisy for sample in samples]),
        timesteps=timesteps,
        text=pad_text([sample.text for sample in samples], length),
        weights=torch.ones_like(sigmas) if weighting == "none" else compute_loss_weighting_for_sd3(weighting, sigmas),
        negative_text=pad_text([sample.negative_text for sample in samples], length) if scales else None,
        scales=torch.tensor(scales) if scales else None,
        velocity=_stack([sample.velocity for sample in samples]),
        stored=_stack([sample.stored for sample in samples]),
    )


def _stack(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """One tensor, or None where the task has none: all samples of a run have the same fields."""
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(present) if present else None
