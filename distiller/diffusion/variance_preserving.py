"""Variance-preserving diffusion with a table of alphas; the network predicts the noise or v."""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false, reportPrivateImportUsage=false
from __future__ import annotations

import warnings
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from torch import Tensor

from distiller.config.diffusion import DiffusionOptions
from distiller.diffusion.flow_matching import load_scheduler
from distiller.diffusion.noise_process import NoiseLevel, NoiseProcess
from distiller.diffusion.pipeline import PipelineFiles
from distiller.errors import UserError
from distiller.storage.stages import digest_of

QUANTITIES = {"epsilon": "noise", "v_prediction": "v"}
"""The scheduler's `prediction_type` -> the name in reports."""
SCHEDULERS = (
    *("DDIMScheduler", "DDPMScheduler", "PNDMScheduler", "LMSDiscreteScheduler", "EulerDiscreteScheduler"),
    *("EulerAncestralDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"),
)
"""Schedulers of networks that were trained on `alphas_cumprod`. Some keep latents at another scale; the network's input
always has unit variance."""


class VariancePreserving(NoiseProcess):
    """x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) e for t = 0 .. T - 1, with a = the scheduler's `alphas_cumprod`.

    Ho et al. 2020 (arXiv 2006.11239), equation 4; v = sqrt(a_t) e - sqrt(1 - a_t) x_0 is that of Salimans and Ho 2022
    (arXiv 2202.00512).
    """

    share_name, auto_shift = "t/T", 1.0

    def __init__(self, files: PipelineFiles) -> None:
        """Reads the scheduler's config. Raises UserError unless it is one of `SCHEDULERS` and predicts noise or v."""
        self._files, config, given = files, files.scheduler_config, files.location.given
        kind = config.get("_class_name")
        if kind not in SCHEDULERS:
            raise UserError(
                f"teacher.path: {given} names the scheduler {kind}; a StableDiffusionPipeline is distilled with "
                f"{', '.join(SCHEDULERS)}"
            )
        predicted = config.get("prediction_type", "epsilon")
        if predicted not in QUANTITIES or config.get("use_flow_sigmas"):
            raise UserError(
                f"teacher.path: {given}: the scheduler's prediction_type is {predicted}"
                f"{' with use_flow_sigmas' if config.get('use_flow_sigmas') else ''}; distilled are "
                f"{' and '.join(QUANTITIES)}"
            )
        if config.get("timestep_type", "discrete") != "discrete":
            raise UserError(
                f"teacher.path: {given}: the scheduler's timestep_type is {config['timestep_type']}, so that the "
                "network's time is no step of its training; distilled are discrete ones"
            )
        self.prediction_type, self.quantity = predicted, QUANTITIES[predicted]
        self._alphas: list[float] = self.load_scheduler().alphas_cumprod.double().tolist()
        self.num_train_timesteps = len(self._alphas)

    def check_task(self, task: DiffusionOptions) -> None:
        if task.timesteps.weighting != "none":
            raise UserError(
                f"task.timesteps.weighting is {task.timesteps.weighting}, which weighs a flow's sigma, and this "
                f"teacher predicts {self.quantity}; set it to none"
            )

    def level(self, share: float) -> NoiseLevel:
        timestep = min(int(share * self.num_train_timesteps), self.num_train_timesteps - 1)
        alpha = self._alphas[timestep]
        return NoiseLevel(share, float(timestep), alpha**0.5, (1 - alpha) ** 0.5)

    def data_target(self, latents: Tensor, noise: Tensor, level: NoiseLevel) -> Tensor:
        return noise if self.prediction_type == "epsilon" else level.signal * noise - level.noise * latents

    def key(self) -> dict[str, Any]:
        return {"prediction_type": self.prediction_type, "alphas": digest_of(self._alphas)}

    def load_scheduler(self) -> Any:
        scheduler = load_scheduler(self._files)
        with warnings.catch_warnings():
            # The pipeline corrects outdated settings of the scheduler and warns each time.
            warnings.simplefilter("ignore", FutureWarning)
            no_components = dict.fromkeys(
                ("vae", "text_encoder", "tokenizer", "unet", "safety_checker", "feature_extractor")
            )
            pipeline = StableDiffusionPipeline(scheduler=scheduler, requires_safety_checker=False, **no_components)
        return pipeline.scheduler

    def set_timesteps(self, scheduler: Any, num_steps: int, device: torch.device) -> None:
        scheduler.set_timesteps(num_steps, device=device)

    def first_latents(self, scheduler: Any, noise: Tensor) -> Tensor:
        return noise * scheduler.init_noise_sigma

    def model_input(self, scheduler: Any, latents: Tensor, timestep: Tensor) -> Tensor:
        return scheduler.scale_model_input(latents, timestep)
