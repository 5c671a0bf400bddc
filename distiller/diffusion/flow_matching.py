"""Flow matching: x_t is on the straight line from x_0 to noise, and the network predicts the velocity along it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from torch import Tensor

from distiller.config.diffusion import DiffusionOptions
from distiller.diffusion.noise_process import NoiseLevel, NoiseProcess
from distiller.diffusion.pipeline import PipelineFiles
from distiller.errors import UserError

FLOW = "flow_prediction"
"""What diffusers calls the velocity in `prediction_type`."""


class FlowMatching(NoiseProcess):
    """x_t = (1 - sigma) x_0 + sigma e, and the network predicts e - x_0 (Lipman et al. 2022, arXiv 2210.02747).

    sigma in (0, 1) is the share of noise; timestep = num_train_timesteps * sigma.
    """

    quantity, share_name = "velocity", "sigma"

    def __init__(self, files: PipelineFiles, auto_shift: float, options: Mapping[str, Any]) -> None:
        """`options` go to the scheduler's `set_timesteps`.

        Raises UserError when diffusers has no such scheduler, or when it does not sample by flow matching.
        """
        self._files, self._options, self.auto_shift = files, options, auto_shift
        self.num_train_timesteps = files.num_train_timesteps
        # With defaults filled in; schedulers that only know flow matching have neither key.
        scheduler = self.load_scheduler()
        config = scheduler.config
        predicted, has_flow_sigmas = config.get("prediction_type", FLOW), config.get("use_flow_sigmas", True)
        if predicted != FLOW or not has_flow_sigmas:
            raise UserError(
                f"teacher.path: {files.source}: its {type(scheduler).__name__} has prediction_type "
                f"{predicted} and use_flow_sigmas {has_flow_sigmas}, and this pipeline is distilled with {FLOW} and "
                "true, with which it was published; correct scheduler/scheduler_config.json"
            )

    def check_task(self, task: DiffusionOptions) -> None:
        del task

    def level(self, share: float) -> NoiseLevel:
        return NoiseLevel(share, share * self.num_train_timesteps, 1 - share, share)

    def data_target(self, latents: Tensor, noise: Tensor, level: NoiseLevel) -> Tensor:
        del level
        return noise - latents

    def key(self) -> dict[str, Any]:
        return {"shift": self.auto_shift, "num_train_timesteps": self.num_train_timesteps}

    def load_scheduler(self) -> Any:
        return load_scheduler(self._files)

    def set_timesteps(self, scheduler: Any, num_steps: int, device: torch.device) -> None:
        scheduler.set_timesteps(num_steps, device=device, **self._options)
        # As WanPipeline does: otherwise the scheduler searches for its first index on the GPU, and the host waits.
        scheduler.set_begin_index(0)

    def first_latents(self, scheduler: Any, noise: Tensor) -> Tensor:
        del scheduler
        return noise

    def model_input(self, scheduler: Any, latents: Tensor, timestep: Tensor) -> Tensor:
        del scheduler, timestep
        return latents


def load_scheduler(files: PipelineFiles) -> Any:
    """The scheduler that a pipeline names. Raises UserError when this diffusers has no such class."""
    name = str(files.scheduler_config.get("_class_name"))
    if not hasattr(diffusers, name):
        raise UserError(
            f"teacher.path: {files.source} names the scheduler {name}, which diffusers {diffusers.__version__} lacks; "
            "upgrade diffusers, or correct scheduler/scheduler_config.json"
        )
    return getattr(diffusers, name).from_pretrained(files.root, subfolder="scheduler", local_files_only=True)


def scheduler_shift(files: PipelineFiles) -> float:
    """The shift of the pipeline's sampling schedule: `shift` or `flow_shift` of its scheduler; 1 without either."""
    return float(files.scheduler_config.get("shift", files.scheduler_config.get("flow_shift", 1.0)) or 1.0)
