"""Random draws as pure functions of (seed, epoch, sample id), on which reproducibility rests.

No global random state is read or changed (`seeded` restores what it sets), so a sample's draws do not depend on the
number of processes, the accumulation split, the teacher's placement, or the step that a run resumed from. CPU
generators only: CUDA's differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def generator(seed: int, epoch: int, sample_id: int, purpose: str) -> torch.Generator:
    """A CPU generator that depends on these arguments alone."""
    name = f"{seed}/{epoch}/{sample_id}/{purpose}".encode()
    value = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    return torch.Generator().manual_seed(value & 0x7FFF_FFFF_FFFF_FFFF)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the global CPU generator, from which libraries draw new weights, and restores its state at the end.

    GPUs' generators are left alone; `torch.manual_seed` would seed them too.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def sample_order(seed: int, epoch: int, num_samples: int) -> list[int]:
    """The order of the samples in an epoch: a permutation of range(num_samples)."""
    return torch.randperm(num_samples, generator=generator(seed, epoch, 0, "order")).tolist()


def noise(seed: int, epoch: int, sample_id: int, shape: tuple[int, ...], purpose: str = "noise") -> Tensor:
    """Standard normal noise, float32 on the CPU."""
    return torch.randn(shape, generator=generator(seed, epoch, sample_id, purpose))


def uniform(seed: int, epoch: int, sample_id: int, purpose: str) -> float:
    """One number in [0, 1)."""
    return torch.rand((), generator=generator(seed, epoch, sample_id, purpose), dtype=torch.float64).item()


def normal(seed: int, epoch: int, sample_id: int, purpose: str) -> float:
    """One standard normal number."""
    return torch.randn((), generator=generator(seed, epoch, sample_id, purpose), dtype=torch.float64).item()
