"""A micro-batch of diffusion samples, and how samples are collated into one."""

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
    """One micro-batch. Tensors are float32 on one device, except conditions, which have the text encoder's dtype.

    Attributes:
        sample_ids: indices of the samples in the data, on the host.
        modules: index of the teacher's module that predicts each sample, on the host; empty with one module.
        noisy: x_t [B, C, F, H, W].
        timesteps: [B], as the network takes them: from 0 to the schedule's `num_train_timesteps`.
        positive: conditions of the prompts by name, each [B, ...].
        weights: [B], weights of the samples in the prediction loss.
        negative: conditions of the negative prompt by name, each [B, ...]; None without guidance.
        scales: [B], guidance scales; None without guidance.
        data_target: target of the true-data loss [B, C, F, H, W], see `NoiseProcess.data_target`; None without it.
        stored: the teacher's predictions from the rollout [B, C, F, H, W]; None unless `task.targets` is `stored`.
    """

    sample_ids: tuple[int, ...]
    modules: tuple[int, ...]
    noisy: Tensor
    timesteps: Tensor
    positive: dict[str, Tensor]
    weights: Tensor
    negative: dict[str, Tensor] | None = None
    scales: Tensor | None = None
    data_target: Tensor | None = None
    stored: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> DiffusionBatch:
        """A batch in which every tensor is replaced by `change(tensor)`."""
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                changed[field.name] = change(value)
            elif isinstance(value, dict):
                changed[field.name] = {name: change(tensor) for name, tensor in value.items()}
        return replace(self, **changed)

    def pin_memory(self) -> DiffusionBatch:
        """Called by the DataLoader. Copies tensors to page-locked memory, so that copies to a GPU need not block."""
        return self.map(Tensor.pin_memory)


def collate(
    samples: Sequence[DiffusionSample], task: DiffusionOptions, family: Family, network: DiffusionNetwork
) -> DiffusionBatch:
    """Stacks samples into a micro-batch on the CPU. Text is padded no further than the family needs (`Family.pad`)."""
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
        data_target=_stack([sample.data_target for sample in samples]),
        stored=_stack([sample.stored for sample in samples]),
    )


def _stack(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """[B, ...], or None if the samples have no such tensor. Either all samples of a run have it, or none has."""
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(present) if present else None
