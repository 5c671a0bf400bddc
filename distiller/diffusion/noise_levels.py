"""Errors of the student's predictions by noise level, on the teacher's own drawings with noise added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from distiller.config.diffusion import DiffusionRecipe
from distiller.data import rng
from distiller.diffusion.family import expand_conditions
from distiller.diffusion.network import PREDICTION, UNCONDITIONAL, DiffusionNetwork, inputs_of
from distiller.diffusion.noise_process import NoiseProcess
from distiller.diffusion.samples import student_scales
from distiller.diffusion.sampling import guide, scale_of
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.teachers.base import Request, Teacher

BANDS = ("0.0-0.2", "0.2-0.4", "0.4-0.6", "0.6-0.8", "0.8-1.0")
"""Equal ranges of the share of noise (see `NoiseLevel.share`), by their names in a report."""
FIGURES = ("relative_error", "cosine")
MARGIN = 1e-4
"""Shares of noise nearer to 0 or 1 lie outside every model's schedule; training draws none either."""


@final
class NoiseLevelErrors:
    """Compares teacher and student at one random noise level in each of `BANDS`, for each sample.

    x_t = signal * x_0 + noise * e, where x_0 is what the teacher has drawn. The level and e depend only on the seed,
    the band and the sample id, and both models get the same x_t. Both are guided as they are when they draw.
    """

    def __init__(
        self,
        recipe: DiffusionRecipe,
        process: NoiseProcess,
        network: DiffusionNetwork,
        teacher: Teacher,
        student: Any,
    ) -> None:
        """`student` is in float32 on the device of the teacher's outputs; `network` is the teacher's."""
        self._recipe, self._process, self._network = recipe, process, network
        self._teacher, self._student = teacher, student
        self._error, self._energy, self._cosine = ([0.0] * len(BANDS) for _ in range(3))
        self._count = 0

    def add(self, drawn: Tensor, sampling_inputs: SamplingInputs) -> None:
        """Adds samples whose latents [B, C, F, H, W] the teacher has drawn from these inputs.

        Communicates if the teacher's placement does.
        """
        seed, purpose, sample_ids = sampling_inputs.seeds
        self._count += len(sample_ids)
        for band in range(len(BANDS)):
            name = f"{purpose} level {band}"
            shares = [(band + rng.uniform(seed, 0, i, name)) / len(BANDS) for i in sample_ids]
            levels = [self._process.level(min(max(share, MARGIN), 1 - MARGIN)) for share in shares]
            noise = torch.stack([rng.noise(seed, 0, i, tuple(drawn.shape[1:]), name) for i in sample_ids])
            signal, share_of_noise = (
                torch.tensor(values, dtype=torch.float32).view(-1, 1, 1, 1, 1)
                for values in ([level.signal for level in levels], [level.noise for level in levels])
            )
            noisy = signal.to(drawn.device) * drawn + (share_of_noise * noise).to(drawn.device)
            times = torch.tensor([level.timestep for level in levels], dtype=torch.float32)
            teacher = self._predict_teacher(noisy, times, sampling_inputs).double().flatten(1)
            student = self._predict_student(noisy, times, sampling_inputs).double().flatten(1)
            self._error[band] += (student - teacher).square().sum().item()
            self._energy[band] += teacher.square().sum().item()
            self._cosine[band] += F.cosine_similarity(student, teacher).sum().item()

    def figures(self) -> dict[str, dict[str, float]]:
        """Of each band, over all samples, of which there is at least one.

        Returns:
            band -> `relative_error`, the sum of ||s - t||^2 over that of ||t||^2 (0 is perfect, 1 a student that
            predicts 0), and `cosine`, the mean over samples of s.t / (||s|| ||t||); s and t are predictions.
        """
        values = zip(BANDS, self._error, self._energy, self._cosine, strict=True)
        return {
            name: dict(zip(FIGURES, (error / energy, cosine / self._count), strict=True))
            for name, error, energy, cosine in values
        }

    def _scales(self, times: Tensor, scales: tuple[float, float]) -> list[float]:
        return [scale_of(scales, self._network.route([time])) for time in times.tolist()]

    def _predict_teacher(self, noisy: Tensor, times: Tensor, sampling_inputs: SamplingInputs) -> Tensor:
        """The teacher's guided predictions [B, C, F, H, W] float32 at timesteps [B]."""
        scales = self._scales(times, self._recipe.sampling.scales)
        is_guided = any(scale != 1 for scale in scales)
        negative = expand_conditions(sampling_inputs.negative, len(noisy)) if is_guided else None
        wanted = (PREDICTION, UNCONDITIONAL) if is_guided else (PREDICTION,)
        inputs = inputs_of(noisy, times.to(noisy.device), sampling_inputs.positive, negative)
        modules = self._network.route(times.tolist())
        with torch.no_grad():
            outputs = self._teacher.predict([Request(tuple(range(len(noisy))), inputs, wanted, modules)])[0]
        conditional = outputs[PREDICTION].float()
        return _guided(conditional, outputs[UNCONDITIONAL].float(), scales) if is_guided else conditional

    def _predict_student(self, noisy: Tensor, times: Tensor, sampling_inputs: SamplingInputs) -> Tensor:
        """The student's predictions, guided where it is when it draws."""
        scales, student = self._scales(times, student_scales(self._recipe)), self._student
        times = times.to(noisy.device)

        def forward(conditions: dict[str, Tensor]) -> Tensor:
            typed = {name: value.to(student.dtype) for name, value in conditions.items()}
            return self._network.architecture.forward(student, noisy, times, typed)

        with torch.no_grad():
            conditional = forward(dict(sampling_inputs.positive))
            if all(scale == 1 for scale in scales):
                return conditional
            return _guided(conditional, forward(expand_conditions(sampling_inputs.negative, len(noisy))), scales)


def _guided(conditional: Tensor, unconditional: Tensor, scales: Sequence[float]) -> Tensor:
    """Predictions [B, C, F, H, W], each guided by its own scale; exactly the conditional one where that is 1."""
    scale = torch.tensor(scales, dtype=conditional.dtype, device=conditional.device).view(-1, 1, 1, 1, 1)
    return torch.where(scale == 1, conditional, guide(conditional, unconditional, scale))
