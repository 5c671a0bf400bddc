"""How a family's latents become noise: in training, and step by step while a sampler draws."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distiller.config.diffusion import DiffusionOptions


@dataclass(frozen=True)
class NoiseLevel:
    """x_t = signal * x_0 + noise * e at `timestep`; `share` in (0, 1) orders levels, 0 is clean."""

    share: float
    timestep: float
    signal: float
    noise: float


class NoiseProcess(ABC):
    """Of one pipeline, for latents of one shape."""

    quantity: str
    """What the network predicts: the name of its errors in figures."""

    share_name: str
    """What `NoiseLevel.share` is called in figures."""

    auto_shift: float
    """`task.timesteps.shift: auto`."""

    num_train_timesteps: int

    def share_of(self, timestep: float) -> float:
        """Of a sampler's timestep."""
        return timestep / self.num_train_timesteps

    def timesteps(self, num_steps: int) -> list[float]:
        """Where drawing in so many steps asks the network; some samplers ask more often than they step."""
        scheduler = self.load_scheduler()
        self.begin(scheduler, num_steps, torch.device("cpu"))
        return scheduler.timesteps.float().tolist()

    @abstractmethod
    def check_task(self, task: DiffusionOptions) -> None:
        """Raises UserError for keys that mean nothing here."""

    @abstractmethod
    def level(self, share: float) -> NoiseLevel:
        """The level of a share in (0, 1), drawn and shifted."""

    @abstractmethod
    def truth(self, latents: Tensor, noise: Tensor, level: NoiseLevel) -> Tensor:
        """What a perfect network would predict for this very x_0 and e."""

    @abstractmethod
    def key(self) -> dict[str, Any]:
        """All of it that training's x_t depends on, for JSON."""

    @abstractmethod
    def load_scheduler(self) -> Any:
        """The pipeline's own scheduler, as the pipeline sets it."""

    @abstractmethod
    def begin(self, scheduler: Any, num_steps: int, device: torch.device) -> None:
        """Sets the scheduler's timesteps as the pipeline does."""

    @abstractmethod
    def first_latents(self, scheduler: Any, noise: Tensor) -> Tensor:
        """Where a sampler begins, from standard normal noise."""

    @abstractmethod
    def model_input(self, scheduler: Any, latents: Tensor, timestep: Tensor) -> Tensor:
        """What the network gets at a step: a sampler may carry its latents in another scale."""
