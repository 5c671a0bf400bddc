"""Rows of the diffusion task's reference table: a recipe, and the key that is changed in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FEATURES = {
    "task.losses.features.weight": 0.5,
    "task.losses.features.student_blocks": [0],
    "task.losses.features.teacher_blocks": [1],
}
TWO_FEATURES = FEATURES | {
    "task.losses.features.student_blocks": [0, 1],
    "task.losses.features.teacher_blocks": [2, 0],
}
HUBER = {"task.losses.prediction.kind": "huber"}
STORED = {"task.targets": "stored"}
LOGIT_NORMAL = {"task.timesteps.sampling": "logit_normal"}
ALMOST_CLEAN = LOGIT_NORMAL | {"task.timesteps.logit_mean": -12.0}
GUIDED = {"task.guidance.scale": 4.0}
DRAWN_GUIDED = {"sampling.guidance_scale": 3.0}
TRUE_DATA = {"task.losses.true_data.weight": 0.5}
FIVE_STEPS = {"sampling.num_inference_steps": 5}
LATENTS, IMAGES = {"data.kind": "latents", "data.path": "latents"}, {"data.kind": "images", "data.path": "images"}


@dataclass(frozen=True)
class Row:
    """A recipe `given`, and what is changed in it; `keeps` says that no number moves by that."""

    pipeline: str
    changed: Mapping[str, Any]
    given: Mapping[str, Any] = field(default_factory=dict)
    keeps: bool = False

    @property
    def name(self) -> str:
        def of(keys: Mapping[str, Any]) -> str:
            return ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in keys.items())

        return f"{self.pipeline}:{of(self.changed) or 'base'}" + (f"|{of(self.given)}" if self.given else "")


ROWS = [
    # What is learnt.
    Row("wan", {}),
    Row("wan", {"seed": 4}),
    Row("wan", {"task.height": 48}),
    Row("wan", {"task.width": 48}),
    Row("wan", {"task.num_frames": 5}),
    Row("wan", {"task.max_sequence_length": None}),
    Row("wan", {"task.condition_dropout": 0.4}),
    # What is dropped becomes the empty prompt, not the negative one.
    Row("wan", {"task.condition_dropout": 0.4}, GUIDED | {"task.guidance.negative_prompt": "blue dog flies"}),
    # Noise levels.
    Row("wan", LOGIT_NORMAL),
    Row("wan", {"task.timesteps.logit_mean": 0.8}, LOGIT_NORMAL),
    Row("wan", {"task.timesteps.logit_mean": 12.0}, LOGIT_NORMAL),
    Row("wan", {"task.timesteps.logit_mean": -12.0}, LOGIT_NORMAL),
    Row("wan", {"task.timesteps.logit_std": 0.3}, LOGIT_NORMAL),
    Row("wan", {"task.timesteps.shift": 1.0}),
    Row("wan", {"task.timesteps.shift": 5.0}, LOGIT_NORMAL),
    Row("wan", {"task.timesteps.weighting": "sigma_sqrt"}),
    Row("wan", {"task.timesteps.weighting": "sigma_sqrt"}, ALMOST_CLEAN),
    Row("wan", {"task.timesteps.weighting": "cosmap"}),
    Row("wan", {"task.timesteps.weighting": "cosmap"}, LATENTS | TRUE_DATA | FEATURES),
    # Guidance that is learnt.
    Row("wan", GUIDED),
    Row("wan", {"task.guidance.scale": [1.5, 6.0]}),
    Row("wan", {"task.guidance.negative_prompt": "blue dog flies"}, GUIDED),
    Row("wan", {"task.guidance.negative_prompt": "blue dog flies"}, DRAWN_GUIDED),
    # Losses.
    Row("wan", {"task.losses.prediction.weight": 0.25}),
    Row("wan", {"task.losses.prediction.weight": 0.25}, FEATURES),
    Row("wan", HUBER),
    Row("wan", {"task.losses.prediction.huber_delta": 0.2}, HUBER),
    Row("wan", FEATURES),
    Row("wan", {"task.losses.features.weight": 2.0}, FEATURES),
    Row("wan", {"task.losses.features.student_blocks": [1]}, FEATURES),
    Row("wan", {"task.losses.features.teacher_blocks": [2]}, FEATURES),
    Row("wan", TWO_FEATURES, FEATURES),
    Row("wan", {"task.losses.prediction.weight": 0.0}, TWO_FEATURES),
    Row("wan", FEATURES, GUIDED | {"task.condition_dropout": 0.4}),
    Row("wan", TRUE_DATA, LATENTS),
    Row("wan", {"task.losses.prediction.weight": 0.0}, LATENTS | TRUE_DATA),
    # Data.
    Row("wan", LATENTS),
    Row("wan", IMAGES),
    Row("wan", TRUE_DATA, IMAGES),
    Row("wan", {"data.max_samples": 8}),
    Row("wan", {"data.max_samples": 8}, LATENTS),
    Row("wan", {"data.max_samples": 8}, IMAGES),
    # Prompts that stand twice have one row among the texts.
    Row("wan", {"data.path": "repeated.txt"}),
    Row("wan", {"data.path": "repeated.txt"}, STORED | DRAWN_GUIDED),
    # The rollout, and what is drawn there.
    Row("wan", {"rollout.enabled": False}),
    Row("wan", {"rollout.samples_per_prompt": 2}),
    Row("wan", {"rollout.samples_per_prompt": 2}, STORED),
    Row("wan", {"rollout.batch_size": 5}, keeps=True),
    Row("wan", {"rollout.dtype": "bfloat16"}),
    Row("wan", {"rollout.dtype": "bfloat16"}, STORED),
    Row("wan", {"sampling.num_inference_steps": 5}),
    Row("wan", {"sampling.num_inference_steps": 5}, STORED),
    Row("wan", DRAWN_GUIDED),
    Row("wan", DRAWN_GUIDED, STORED),
    Row("wan", STORED),
    Row("wan", {"task.timesteps.weighting": "sigma_sqrt"}, STORED),
    # A run of four updates of four samples begins a second epoch.
    Row("wan", {"cache.draws": 1}),
    Row("wan", {"cache.draws": 1}, STORED),
    # Two experts.
    Row("wan2", {}, FIVE_STEPS),
    Row("wan2", GUIDED, FIVE_STEPS),
    Row("wan2", {"task.guidance.scale_2": 2.0}, FIVE_STEPS | GUIDED),
    Row("wan2", {"task.guidance.scale": [1.5, 6.0]}, FIVE_STEPS),
    Row("wan2", TWO_FEATURES, FIVE_STEPS | GUIDED),
    Row("wan2", {"sampling.guidance_scale": 4.0}, FIVE_STEPS),
    Row("wan2", {"sampling.guidance_scale_2": 2.0}, FIVE_STEPS | {"sampling.guidance_scale": 4.0}),
    Row("wan2", {"sampling.guidance_scale_2": 2.0}, FIVE_STEPS | {"sampling.guidance_scale": 4.0} | STORED),
    # The first scale decides whether the pipeline guides at all.
    Row("wan2", {"sampling.guidance_scale_2": 0.5}, FIVE_STEPS | {"sampling.guidance_scale": 4.0} | STORED),
    Row("wan2", {"sampling.guidance_scale_2": 3.0}, FIVE_STEPS | {"sampling.guidance_scale": 1.0} | STORED, keeps=True),
    # Stable Diffusion 3.
    Row("sd3", {}),
    Row("sd3-dynamic", {}),
    Row("sd3-dynamic", {"task.timesteps.shift": 1.0}),
    Row("sd3", {"task.max_sequence_length": 9}),
    Row("sd3", {"task.condition_dropout": 0.4}),
    Row("sd3", GUIDED),
    Row(
        "sd3",
        {"task.guidance.negative_prompt": "blue dog flies"},
        GUIDED | DRAWN_GUIDED | STORED | {"task.guidance.scale": None},
    ),
    Row("sd3", DRAWN_GUIDED, STORED),
    Row("sd3", {"task.timesteps.weighting": "cosmap"}),
    Row("sd3", TWO_FEATURES),
    Row("sd3", TRUE_DATA, IMAGES),
    Row("sd3", {"train.mixed_precision": "bf16"}, LATENTS | GUIDED),
    Row("sd3", {"teacher.dtype": "bfloat16"}, LATENTS | GUIDED | TWO_FEATURES),
    # Stable Diffusion, whose network predicts the noise, or v.
    Row("sd", GUIDED),
    Row("sd", LOGIT_NORMAL),
    Row("sd", DRAWN_GUIDED, STORED),
    Row("sd", TRUE_DATA, LATENTS),
    Row("sd-v", DRAWN_GUIDED, STORED),
    Row("sd-v", TRUE_DATA, LATENTS),
    Row("sd", TRUE_DATA, IMAGES),
    Row("sd", TWO_FEATURES),
    # Samplers in another scale, that ask more often than they step, and that draw noise on the way.
    Row("sd-euler", DRAWN_GUIDED, STORED),
    Row("sd-pndm", DRAWN_GUIDED, STORED),
    Row("sd-ancestral", DRAWN_GUIDED),
]
