"""Interface of a noise process: how training adds noise to latents, and how sampling uses the scheduler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distiller.config.diffusion import DiffusionOptions


@dataclass(frozen=True)
class NoiseLevel:
    """x_t = signal * x_0 + noise * e, with e standard normal.

    Attributes:
        share: the share of noise in (0, 1), which orders levels; 0 is clean.
        timestep: what the network takes as time, from 0 to `num_train_timesteps`.
        signal: factor of x_0.
        noise: factor of e.
    """

    share: float
    timestep: float
    signal: float
    noise: float


class NoiseProcess(ABC):
    """The noise process of one pipeline, for latents of one shape."""

    quantity: str
    """What the network predicts, as reports name it: velocity, noise or v."""

    share_name: str
    """What reports call `NoiseLevel.share`."""

    auto_shift: float
    """The value of `task.timesteps.shift: auto`."""

    num_train_timesteps: int
    """Length of the training schedule in timesteps."""

    def share_of(self, timestep: float) -> float:
        """The share of noise at a timestep of the scheduler."""
        return timestep / self.num_train_timesteps

    def timesteps(self, num_steps: int) -> list[float]:
        """Timesteps at which sampling in `num_steps` steps runs the network; some schedulers have several a step."""
        scheduler = self.load_scheduler()
        self.set_timesteps(scheduler, num_steps, torch.device("cpu"))
        return scheduler.timesteps.float().tolist()

    @abstractmethod
    def check_task(self, task: DiffusionOptions) -> None:
        """Raises UserError for keys of the recipe that have no meaning for this process."""

    @abstractmethod
    def level(self, share: float) -> NoiseLevel:
        """The level at a share of noise in (0, 1), after the shift."""

    @abstractmethod
    def data_target(self, latents: Tensor, noise: Tensor, level: NoiseLevel) -> Tensor:
        """The target that follows from the data: the prediction that is right for x_0 `latents` and e `noise`.

        All three have the same shape.
        """

    @abstractmethod
    def key(self) -> dict[str, Any]:
        """The settings of the process that x_t depends on in training, for JSON."""

    @abstractmethod
    def load_scheduler(self) -> Any:
        """A new scheduler of the pipeline, with the pipeline's settings. Raises UserError."""

    @abstractmethod
    def set_timesteps(self, scheduler: Any, num_steps: int, device: torch.device) -> None:
        """Sets the scheduler's timesteps on the device, as the pipeline does."""

    @abstractmethod
    def first_latents(self, scheduler: Any, noise: Tensor) -> Tensor:
        """The latents that sampling starts from, made from standard normal noise of the same shape."""

    @abstractmethod
    def model_input(self, scheduler: Any, latents: Tensor, timestep: Tensor) -> Tensor:
        """The network's input at a step, like the latents; some schedulers keep latents at another scale."""
