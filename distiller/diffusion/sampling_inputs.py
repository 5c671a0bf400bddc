"""What a batch is sampled from: the first noise and the embedded prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distiller.data import rng


@dataclass(frozen=True)
class SamplingInputs:
    """The first noise and the prompts of a batch, on one device.

    Attributes:
        noise: [B, C, F, H, W] float32.
        positive: the prompts' conditions [B, ...], by name.
        negative: those of the negative prompt [1, ...].
        seeds: (seed, purpose, sample ids) of the noise that some samplers draw on the way.
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
        """With noise that depends on seed, purpose and sample id alone; everything goes to the device."""
        noise = torch.stack([rng.noise(seed, 0, i, shape, purpose) for i in sample_ids]).to(device)
        return SamplingInputs(
            noise,
            {name: value.to(device) for name, value in positive.items()},
            {name: value.to(device) for name, value in negative.items()},
            (seed, purpose, tuple(sample_ids)),
        )

    def split(self, size: int) -> list[SamplingInputs]:
        """Parts of so many samples, the last of what is left; they view this one's tensors."""
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
        """One for each sample, new each time: all that draw from these conditions see the same noise on the way."""
        seed, purpose, sample_ids = self.seeds
        return [rng.generator(seed, 0, i, f"{purpose} steps") for i in sample_ids]
