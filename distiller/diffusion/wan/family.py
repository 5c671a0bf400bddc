"""`WanPipeline`: Wan 2.1 (one transformer) and Wan 2.2 (two experts), text to image or to video."""

# Names that the libraries import lazily, or from C, without exporting them in their stubs.
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import WanPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from diffusers.utils import is_ftfy_available
from torch import Tensor

from distiller.config.diffusion import DiffusionOptions, DiffusionRecipe, DiffusionStudent
from distiller.diffusion.architecture import LatentShape
from distiller.diffusion.family import Condition, Family, expand_conditions
from distiller.diffusion.flow_matching import FlowMatching, scheduler_shift
from distiller.diffusion.noise_process import NoiseProcess
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.diffusion.vae import Vae
from distiller.diffusion.wan.architecture import WanArchitecture
from distiller.diffusion.wan.short_text import PIPELINE_TEXT_LENGTH, short_length
from distiller.diffusion.wan.vae import WanVae
from distiller.errors import UserError

PATCH_OF_EXPANDED_TIMESTEPS = (1, 2, 2)
"""The pipeline's call assumes it where model_index.json says expand_timesteps."""


class WanFamily(Family):
    """See `Family`; prompts become `text` [n, D], the embeddings of their n tokens without padding."""

    pipeline_class = WanPipeline
    architecture = WanArchitecture()
    network_parts = ("transformer", "transformer_2")
    default_size_is_training_size = False
    text_parts = ("text_encoder", "tokenizer")

    def check_files(self) -> None:
        given, boundary = self.files.location.given, self.files.boundary_ratio
        if ("transformer_2" in self.files.configs) != (boundary is not None):
            raise UserError(
                f"teacher.path: {given} has {len(self.files.configs)} transformer(s) and boundary_ratio {boundary}; "
                "model_index.json must name both transformer_2 and boundary_ratio, or neither"
            )
        if boundary is not None and not (isinstance(boundary, float) and 0 < boundary < 1):
            raise UserError(f"teacher.path: {given}: boundary_ratio is {boundary!r}; it must lie between 0 and 1")

    def check_task(self, task: DiffusionOptions) -> None:
        del task

    def check_student(self, student: DiffusionStudent, config: Mapping[str, Any]) -> None:
        del student
        if self.files.index.get("expand_timesteps") and tuple(config["patch_size"]) != PATCH_OF_EXPANDED_TIMESTEPS:
            raise UserError(
                f"the student's patch_size is {list(config['patch_size'])}, and a WanPipeline with expand_timesteps "
                f"(Wan 2.2 TI2V) draws with {list(PATCH_OF_EXPANDED_TIMESTEPS)} alone; correct it"
            )

    def default_size(self) -> tuple[int, int, int]:
        # Defaults of the pipeline's call, rounded as the call rounds them to sizes that its networks can take.
        temporal, spatial = self._vae_steps
        num_frames, height, width = (int(self.call_defaults[name]) for name in ("num_frames", "height", "width"))
        _, patch_height, patch_width = self.teacher_config["patch_size"]
        height -= height % (spatial * patch_height)
        width -= width % (spatial * patch_width)
        if num_frames % temporal != 1:
            num_frames = num_frames // temporal * temporal + 1
        return num_frames, height, width

    def pixel_size(self, shape: LatentShape) -> tuple[int, int, int]:
        temporal, spatial = self._vae_steps
        return (shape[1] - 1) * temporal + 1, shape[2] * spatial, shape[3] * spatial

    @property
    def _vae_steps(self) -> tuple[int, int]:
        """(frames, pixels along height and width) per latent."""
        config = self.files.vae_config
        return int(config.get("scale_factor_temporal", 4)), int(config.get("scale_factor_spatial", 8))

    def latent_shape(self, num_frames: int, height: int, width: int) -> LatentShape:
        temporal, spatial = self._vae_steps
        _, patch_height, patch_width = self.teacher_config["patch_size"]
        for name, pixels, step in (("height", height, spatial * patch_height), ("width", width, spatial * patch_width)):
            if pixels % step or pixels % 16:
                raise UserError(f"task.{name} {pixels} is not a multiple of {max(step, 16)}, as this pipeline needs")
        if extra := (num_frames - 1) % temporal:
            lower = num_frames - extra
            raise UserError(
                f"task.num_frames {num_frames} is not {temporal} k + 1, as this pipeline's VAE needs; give {lower} or "
                f"{lower + temporal}"
            )
        channels = int(self.teacher_config["in_channels"])
        return channels, (num_frames - 1) // temporal + 1, height // spatial, width // spatial

    def noise_process(self, shape: LatentShape) -> NoiseProcess:
        del shape
        return FlowMatching(self.files, scheduler_shift(self.files), {})

    def text_length(self, task: DiffusionOptions) -> int:
        return task.max_sequence_length or PIPELINE_TEXT_LENGTH

    def max_tokens(self, tokenizers: Mapping[str, Any], length: int) -> dict[str, int]:
        return dict.fromkeys(tokenizers, length)

    def clean_prompts(self, prompts: Sequence[str]) -> list[str]:
        return [prompt_clean(prompt) for prompt in prompts]

    def text_key(self) -> dict[str, Any]:
        return {"cleaned_by_ftfy": is_ftfy_available()}

    def _read_text_encoder(self, dtype: torch.dtype, device: torch.device) -> Any:
        pipeline = WanPipeline.from_pretrained(
            self.files.fetch(*self.text_parts, "scheduler"),
            transformer=None,
            transformer_2=None,
            vae=None,
            dtype=dtype,
            low_cpu_mem_usage=True,
            use_safetensors=True,
            local_files_only=True,
        )
        return pipeline.to(device)

    def embed(self, pipeline: Any, prompts: Sequence[str], length: int) -> list[Condition]:
        """See `Family.embed`.

        The pipeline would pad to `length` before the encoder, which masks the padding. Here prompts are padded to the
        longest one, which gives the same embeddings and is an order of magnitude faster for short prompts.
        """
        tokens = pipeline.tokenizer(
            self.clean_prompts(prompts), truncation=True, max_length=length, add_special_tokens=True
        )
        lengths = [len(ids) for ids in tokens.input_ids]
        with torch.no_grad():
            embeds, _ = pipeline.encode_prompt(
                list(prompts), do_classifier_free_guidance=False, max_sequence_length=max(lengths)
            )
        return [{"text": row[:count].clone()} for row, count in zip(embeds, lengths, strict=True)]

    def pad(self, texts: Sequence[Tensor], length: int) -> Tensor:
        """Pads texts with two or more zero rows to [B, L, D], L a multiple of 8 or `length`.

        `distiller.diffusion.wan.short_text` gives these zero rows the weight of all that the pipeline would add.
        """
        padded_length = short_length(max(len(text) for text in texts), length)
        padded = texts[0].new_zeros(len(texts), padded_length, texts[0].shape[-1])
        for row, text in zip(padded, texts, strict=True):
            row[: len(text)] = text
        return padded

    def longest_condition(self, texts: Sequence[str], length: int) -> Condition:
        tokenizer = self.load_tokenizers()["tokenizer"]
        tokens = tokenizer(self.clean_prompts(texts), truncation=True, max_length=length).input_ids
        return {"text": torch.zeros(max(map(len, tokens)), self.teacher_config["text_dim"])}

    def load_vae(self, device: torch.device) -> Vae:
        return WanVae(self.files, device)

    def load_pipeline(self, student: Any) -> Any:
        return WanPipeline.from_pretrained(
            self.files.fetch("scheduler"),
            transformer=student,
            transformer_2=None,
            vae=None,
            text_encoder=None,
            tokenizer=None,
            boundary_ratio=None,
            local_files_only=True,
        )

    def draw(self, pipeline: Any, sampling_inputs: SamplingInputs, recipe: DiffusionRecipe, scale: float) -> Tensor:
        negative = expand_conditions(sampling_inputs.negative, len(sampling_inputs.noise))
        num_frames, height, width = recipe.task.size
        return pipeline(
            latents=sampling_inputs.noise,
            prompt_embeds=sampling_inputs.positive["text"].float(),
            negative_prompt_embeds=negative["text"].float(),
            height=height,
            width=width,
            num_frames=num_frames,
            num_inference_steps=recipe.sampling.num_steps,
            guidance_scale=scale,
            output_type="latent",
        ).frames
