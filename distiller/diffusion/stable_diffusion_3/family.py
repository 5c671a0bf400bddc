"""`StableDiffusion3Pipeline`: Stable Diffusion 3 and 3.5, with or without their third text encoder."""

# Names that the libraries import lazily, or from C, without exporting them in their stubs.
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import StableDiffusion3Pipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from torch import Tensor

from distiller.config.diffusion import DiffusionOptions, DiffusionRecipe, DiffusionStudent
from distiller.diffusion.architecture import LatentShape
from distiller.diffusion.family import Condition, Family, expand_conditions
from distiller.diffusion.flow_matching import FlowMatching, load_scheduler, scheduler_shift
from distiller.diffusion.kl_vae import KlVae, pixels_of_latent
from distiller.diffusion.noise_process import NoiseProcess
from distiller.diffusion.picture_size import latent_size
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.diffusion.stable_diffusion_3.architecture import SD3Architecture
from distiller.diffusion.vae import Vae
from distiller.errors import UserError

PIPELINE_TEXT_LENGTH, LONGEST_TEXT = 256, 512
"""Tokens that the pipeline pads the third encoder's text to: by default, and at most."""

SCHEDULER = "FlowMatchEulerDiscreteScheduler"
ENCODERS = (("text_encoder", "tokenizer"), ("text_encoder_2", "tokenizer_2"))
THIRD_ENCODER = ("text_encoder_3", "tokenizer_3")


class SD3Family(Family):
    """See `Family`; prompts become `text` [77 + n, D], from all encoders, and `pooled` [P], from the first two.

    77 is the limit of the published CLIP tokenizers, n is `text_length`.
    """

    pipeline_class = StableDiffusion3Pipeline
    architecture = SD3Architecture()
    network_parts = ("transformer",)
    default_size_is_training_size = True

    def check_files(self) -> None:
        given = self.files.location.given
        for part in (part for pair in ENCODERS for part in pair):
            if not self.files.has(part):
                raise UserError(f"teacher.path: {given} has no {part}; give the complete pipeline")
        kind = self.files.scheduler_config.get("_class_name")
        if kind != SCHEDULER:
            raise UserError(
                f"teacher.path: {given} names the scheduler {kind}; a StableDiffusion3Pipeline is distilled with "
                f"{SCHEDULER}, which it was published with"
            )
        self._has_third = all(self.files.has(part) for part in THIRD_ENCODER)
        self.text_parts = tuple(
            part for pair in (*ENCODERS, *((THIRD_ENCODER,) if self._has_third else ())) for part in pair
        )

    def check_task(self, task: DiffusionOptions) -> None:
        if (task.max_sequence_length or 0) > LONGEST_TEXT:
            raise UserError(
                f"task.max_sequence_length is {task.max_sequence_length} and a StableDiffusion3Pipeline takes at most "
                f"{LONGEST_TEXT}; lower it"
            )

    def check_student(self, student: DiffusionStudent, config: Mapping[str, Any]) -> None:
        del student, config

    def default_size(self) -> tuple[int, int, int]:
        side = self.teacher_config["sample_size"] * pixels_of_latent(self.files.vae_config)
        return 1, side, side

    def pixel_size(self, shape: LatentShape) -> tuple[int, int, int]:
        pixels = pixels_of_latent(self.files.vae_config)
        return 1, shape[2] * pixels, shape[3] * pixels

    def latent_shape(self, num_frames: int, height: int, width: int) -> LatentShape:
        pixels, config = pixels_of_latent(self.files.vae_config), self.teacher_config
        step = pixels * config["patch_size"]
        size = latent_size("StableDiffusion3Pipeline", num_frames, height, width, step, pixels)
        return config["in_channels"], 1, *size

    def noise_process(self, shape: LatentShape) -> NoiseProcess:
        # As the pipeline reads it: with the scheduler's own defaults filled in.
        config = load_scheduler(self.files).config
        if not config.get("use_dynamic_shifting"):
            return FlowMatching(self.files, scheduler_shift(self.files), {})
        mu = calculate_shift(
            self.architecture.num_tokens(self.teacher_config, shape),
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.16),
        )
        # The scheduler uses mu as the shift if time_shift_type is linear, and otherwise e^mu.
        shift = mu if config.get("time_shift_type") == "linear" else math.exp(mu)
        return FlowMatching(self.files, shift, {"mu": mu})

    def text_length(self, task: DiffusionOptions) -> int:
        return task.max_sequence_length or PIPELINE_TEXT_LENGTH

    def max_tokens(self, tokenizers: Mapping[str, Any], length: int) -> dict[str, int]:
        # The pipeline uses the limit of its first tokenizer for both CLIP tokenizers.
        clip = tokenizers["tokenizer"].model_max_length
        return {name: length if name == THIRD_ENCODER[1] else clip for name in tokenizers}

    def clean_prompts(self, prompts: Sequence[str]) -> list[str]:
        return list(prompts)

    def text_key(self) -> dict[str, Any]:
        return {}

    def _read_text_encoder(self, dtype: torch.dtype, device: torch.device) -> Any:
        pipeline = StableDiffusion3Pipeline.from_pretrained(
            self.files.fetch(*self.text_parts, "scheduler"),
            transformer=None,
            vae=None,
            dtype=dtype,
            low_cpu_mem_usage=True,
            use_safetensors=True,
            local_files_only=True,
            **dict.fromkeys(() if self._has_third else THIRD_ENCODER),
        ).to(device)
        # Without a third encoder the pipeline uses zeros as its embeddings, in the width that the transformer's config
        # says; so it gets a transformer, without weights.
        with init_empty_weights():
            pipeline.transformer = self.architecture.model_class.from_config(self.teacher_config)
        return pipeline

    def embed(self, pipeline: Any, prompts: Sequence[str], length: int) -> list[Condition]:
        with torch.no_grad():
            text, _, pooled, _ = pipeline.encode_prompt(
                list(prompts),
                None,
                None,
                device=pipeline.text_encoder.device,
                do_classifier_free_guidance=False,
                max_sequence_length=length,
            )
        # The zeros that replace a third encoder's embeddings may have another dtype.
        text = text.to(pooled.dtype)
        return [{"text": row, "pooled": vector} for row, vector in zip(text, pooled, strict=True)]

    def pad(self, texts: Sequence[Tensor], length: int) -> Tensor:
        del length
        return torch.stack(list(texts))

    def longest_condition(self, texts: Sequence[str], length: int) -> Condition:
        del texts
        config, clip_length = self.teacher_config, self.load_tokenizers()["tokenizer"].model_max_length
        text = torch.zeros(clip_length + length, config["joint_attention_dim"])
        return {"text": text, "pooled": torch.zeros(config["pooled_projection_dim"])}

    def load_vae(self, device: torch.device) -> Vae:
        return KlVae(self.files, device)

    def load_pipeline(self, student: Any) -> Any:
        return StableDiffusion3Pipeline.from_pretrained(
            self.files.fetch("scheduler"),
            transformer=student,
            vae=None,
            local_files_only=True,
            **dict.fromkeys(part for pair in (*ENCODERS, THIRD_ENCODER) for part in pair),
        )

    def draw(self, pipeline: Any, sampling_inputs: SamplingInputs, recipe: DiffusionRecipe, scale: float) -> Tensor:
        negative = expand_conditions(sampling_inputs.negative, len(sampling_inputs.noise))
        height, width = sampling_inputs.noise.shape[3:]
        drawn = pipeline(
            latents=sampling_inputs.noise.squeeze(2),
            prompt_embeds=sampling_inputs.positive["text"].float(),
            pooled_prompt_embeds=sampling_inputs.positive["pooled"].float(),
            negative_prompt_embeds=negative["text"].float(),
            negative_pooled_prompt_embeds=negative["pooled"].float(),
            height=height * pipeline.vae_scale_factor,
            width=width * pipeline.vae_scale_factor,
            num_inference_steps=recipe.sampling.num_steps,
            guidance_scale=scale,
            output_type="latent",
        )
        return drawn.images.unsqueeze(2)
