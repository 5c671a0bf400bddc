"""A micro-batch of diffusion samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3
from torch import Tensor

from distiller.config.diffusion import DiffusionOptions
from distiller.diffusion.family import Family
from distiller.diffusion.network import DiffusionNetwork
from distiller.diffusion.noising import DiffusionSample


@dataclass(frozen=True)
class DiffusionBatch:
    """One micro-batch. Tensors are float32 unless said; conditions have the text encoder's dtype.

    Attributes:
        noisy: x_t [B, C, F, H, W].
        timesteps: [B].
        positive: the prompts' conditions [B, ...], by name; `negative` only with guidance.
        weights: [B] of the prediction term.
        scales: [B] guidance scales, with guidance.
        truth: what a perfect network would predict [B, C, F, H, W], for the true-data term.
        stored: the trajectory's own predictions [B, C, F, H, W], with stored targets.
        modules: the teacher's module of each sample (host).
    """

    sample_ids: tuple[int, ...]
    modules: tuple[int, ...]
    noisy: Tensor
    timesteps: Tensor
    positive: dict[str, Tensor]
    weights: Tensor
    negative: dict[str, Tensor] | None = None
    scales: Tensor | None = None
    truth: Tensor | None = None
    stored: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> DiffusionBatch:
        """The batch with every tensor changed."""
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                changed[field.name] = change(value)
            elif isinstance(value, dict):
                changed[field.name] = {name: change(tensor) for name, tensor in value.items()}
        return replace(self, **changed)

    def pin_memory(self) -> DiffusionBatch:
        """Called by the DataLoader: page-locked memory, from which copies to a GPU do not block."""
        return self.map(Tensor.pin_memory)


def collate(
    samples: Sequence[DiffusionSample], task: DiffusionOptions, family: Family, network: DiffusionNetwork
) -> DiffusionBatch:
    """Stacks samples on the CPU; text is padded as little as the family allows."""
    timesteps = torch.tensor([sample.timestep for sample in samples], dtype=torch.float32)
    shares = torch.tensor([sample.share for sample in samples], dtype=torch.float32)
    length, weighting = family.text_length(task), task.timesteps.weighting
    scales = [sample.scale for sample in samples if sample.scale is not None]
    return DiffusionBatch(
        sample_ids=tuple(sample.sample_id for sample in samples),
        modules=network.route(timesteps.tolist()),
        noisy=torch.stack([sample.noisy for sample in samples]),
        timesteps=timesteps,
        positive=family.stack([sample.positive for sample in samples], length),
        weights=torch.ones_like(shares) if weighting == "none" else compute_loss_weighting_for_sd3(weighting, shares),
        negative=family.stack([sample.negative for sample in samples], length) if scales else None,
        scales=torch.tensor(scales) if scales else None,
        truth=_stack([sample.truth for sample in samples]),
        stored=_stack([sample.stored for sample in samples]),
    )


def _stack(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """One tensor, or None where the task has none: all samples of a run have the same fields."""
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(present) if present else None
