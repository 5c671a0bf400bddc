"""The inputs of sampling: the initial noise and the embedded prompts of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distiller.data import rng


@dataclass(frozen=True)
class SamplingInputs:
    """The initial noise and the prompts' conditions of a batch, on one device.

    Attributes:
        noise: [B, C, F, H, W] float32.
        positive: conditions of the prompts by name, each [B, ...].
        negative: conditions of the negative prompt by name, each [1, ...].
        seeds: (seed, purpose, sample ids), from which `generators` derives the noise that some samplers add at a step.
    """

    noise: Tensor
    positive: Mapping[str, Tensor]
    negative: Mapping[str, Tensor]
    seeds: tuple[int, str, tuple[int, ...]]

    @staticmethod
    def make(
        seed: int,
        purpose: str,
        sample_ids: Sequence[int],
        shape: tuple[int, ...],
        positive: Mapping[str, Tensor],
        negative: Mapping[str, Tensor],
        device: torch.device,
    ) -> SamplingInputs:
        """Makes noise [B, *shape] that depends only on seed, purpose and sample id; moves everything to the device."""
        noise = torch.stack([rng.noise(seed, 0, i, shape, purpose) for i in sample_ids]).to(device)
        return SamplingInputs(
            noise,
            {name: value.to(device) for name, value in positive.items()},
            {name: value.to(device) for name, value in negative.items()},
            (seed, purpose, tuple(sample_ids)),
        )

    def split(self, size: int) -> list[SamplingInputs]:
        """Parts of `size` samples (the last may be smaller), whose tensors are views of this one's."""
        seed, purpose, sample_ids = self.seeds
        return [
            SamplingInputs(
                self.noise[first : first + size],
                {name: value[first : first + size] for name, value in self.positive.items()},
                self.negative,
                (seed, purpose, sample_ids[first : first + size]),
            )
            for first in range(0, len(self.noise), size)
        ]

    def generators(self) -> list[torch.Generator]:
        """One new CPU generator for each sample, for samplers that add noise at their steps.

        Each call returns generators in the same state, so teacher and student get the same noise.
        """
        seed, purpose, sample_ids = self.seeds
        return [rng.generator(seed, 0, i, f"{purpose} steps") for i in sample_ids]
