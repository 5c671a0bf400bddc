"""`StableDiffusionPipeline`: Stable Diffusion 1 and 2, and models that were derived from them."""

# Names that the libraries import lazily, or from C, without exporting them in their stubs.
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from packaging.version import Version
from torch import Tensor

from distiller.config.diffusion import DiffusionOptions, DiffusionRecipe, DiffusionStudent
from distiller.diffusion.architecture import LatentShape
from distiller.diffusion.family import Condition, Family, expand_conditions
from distiller.diffusion.kl_vae import KlVae, pixels_of_latent
from distiller.diffusion.noise_process import NoiseProcess
from distiller.diffusion.picture_size import latent_size
from distiller.diffusion.pipeline import read_json
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.diffusion.stable_diffusion.architecture import UNetArchitecture
from distiller.diffusion.vae import Vae
from distiller.diffusion.variance_preserving import VariancePreserving
from distiller.errors import UserError
from distiller.storage.packaged_files import local_path

LONGEST_TEXT = 10_000
"""Above every real `model_max_length`, in tokens; tokenizers that were saved without a limit have a huge number."""

FIRST_WITH_SAMPLE_SIZE, OLD_SAMPLE_SIZE = Version("0.9.0.dev0"), 64
"""In files that diffusers saved before this version, the pipeline raises a smaller `sample_size` to 64 latents."""

UNUSED_COMPONENTS = ("safety_checker", "feature_extractor", "image_encoder")
"""Components that neither predict nor embed prompts, and are not loaded."""


class StableDiffusionFamily(Family):
    """See `Family`; prompts become `text` [n, D], with n the tokenizer's limit (77 in the published pipelines)."""

    pipeline_class = StableDiffusionPipeline
    architecture = UNetArchitecture()
    network_parts = ("unet",)
    default_size_is_training_size = True
    text_parts = ("text_encoder", "tokenizer")

    def check_files(self) -> None:
        given = self.files.location.given
        config = read_json(self.files.root / "tokenizer" / "tokenizer_config.json", given)
        length = config.get("model_max_length")
        if not isinstance(length, int) or not 0 < length < LONGEST_TEXT:
            raise UserError(
                f"teacher.path: {given}: tokenizer/tokenizer_config.json says model_max_length {length}; the pipeline "
                "pads every prompt to it, so give the number of positions that the text encoder has"
            )
        self._length = length

    def check_task(self, task: DiffusionOptions) -> None:
        if task.max_sequence_length not in (None, self._length):
            raise UserError(
                f"task.max_sequence_length is {task.max_sequence_length} and a StableDiffusionPipeline pads every "
                f"prompt to its tokenizer's {self._length}; leave it out"
            )

    def check_student(self, student: DiffusionStudent, config: Mapping[str, Any]) -> None:
        del config
        if student.path is None:
            return
        folder = local_path(student.path)
        root = folder if (folder / self.architecture.part).is_dir() else folder.parent
        file = root / "scheduler" / "scheduler_config.json"
        if not file.is_file():
            return
        student_type = read_json(file, student.path).get("prediction_type", "epsilon")
        teacher_type = self.files.scheduler_config.get("prediction_type", "epsilon")
        if student_type != teacher_type:
            raise UserError(
                f"student.path: {student.path} is of a pipeline whose prediction_type is {student_type} and the "
                f"teacher's is {teacher_type}; both must predict the same"
            )

    def default_size(self) -> tuple[int, int, int]:
        size, pixels = self.teacher_config["sample_size"], pixels_of_latent(self.files.vae_config)
        sides = size if isinstance(size, list | tuple) else (size, size)
        if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
            raise UserError(
                f"teacher.path: {self.files.location.given}: unet/config.json says sample_size {size!r}, from which no "
                "size of a picture follows; give task.height and task.width"
            )
        saved_by = self.teacher_config.get("_diffusers_version")
        if isinstance(size, int) and saved_by is not None and Version(saved_by) < FIRST_WITH_SAMPLE_SIZE:
            # As the pipeline corrects it: early files of Stable Diffusion 1 say 32.
            sides = (max(size, OLD_SAMPLE_SIZE),) * 2
        return 1, sides[0] * pixels, sides[1] * pixels

    def pixel_size(self, shape: LatentShape) -> tuple[int, int, int]:
        pixels = pixels_of_latent(self.files.vae_config)
        return 1, shape[2] * pixels, shape[3] * pixels

    def latent_shape(self, num_frames: int, height: int, width: int) -> LatentShape:
        pixels = pixels_of_latent(self.files.vae_config)
        size = latent_size("StableDiffusionPipeline", num_frames, height, width, pixels, pixels)
        return self.teacher_config["in_channels"], 1, *size

    def noise_process(self, shape: LatentShape) -> NoiseProcess:
        del shape
        return VariancePreserving(self.files)

    def text_length(self, task: DiffusionOptions) -> int:
        del task
        return self._length

    def max_tokens(self, tokenizers: Mapping[str, Any], length: int) -> dict[str, int]:
        return dict.fromkeys(tokenizers, length)

    def clean_prompts(self, prompts: Sequence[str]) -> list[str]:
        return list(prompts)

    def text_key(self) -> dict[str, Any]:
        return {}

    def _read_text_encoder(self, dtype: torch.dtype, device: torch.device) -> Any:
        pipeline = StableDiffusionPipeline.from_pretrained(
            self.files.fetch(*self.text_parts, "scheduler"),
            scheduler=VariancePreserving(self.files).load_scheduler(),
            unet=None,
            vae=None,
            requires_safety_checker=False,
            dtype=dtype,
            low_cpu_mem_usage=True,
            use_safetensors=True,
            local_files_only=True,
            **dict.fromkeys(UNUSED_COMPONENTS),
        )
        return pipeline.to(device)

    def embed(self, pipeline: Any, prompts: Sequence[str], length: int) -> list[Condition]:
        del length
        with torch.no_grad():
            text, _ = pipeline.encode_prompt(list(prompts), pipeline.text_encoder.device, 1, False)
        return [{"text": row} for row in text]

    def pad(self, texts: Sequence[Tensor], length: int) -> Tensor:
        del length
        return torch.stack(list(texts))

    def longest_condition(self, texts: Sequence[str], length: int) -> Condition:
        del texts
        return {"text": torch.zeros(length, self.teacher_config["cross_attention_dim"])}

    def load_vae(self, device: torch.device) -> Vae:
        return KlVae(self.files, device)

    def load_pipeline(self, student: Any) -> Any:
        return StableDiffusionPipeline.from_pretrained(
            self.files.fetch("scheduler"),
            scheduler=VariancePreserving(self.files).load_scheduler(),
            unet=student,
            vae=None,
            text_encoder=None,
            tokenizer=None,
            requires_safety_checker=False,
            local_files_only=True,
            **dict.fromkeys(UNUSED_COMPONENTS),
        )

    def draw(self, pipeline: Any, sampling_inputs: SamplingInputs, recipe: DiffusionRecipe, scale: float) -> Tensor:
        negative = expand_conditions(sampling_inputs.negative, len(sampling_inputs.noise))
        height, width = sampling_inputs.noise.shape[3:]
        drawn = pipeline(
            latents=sampling_inputs.noise.squeeze(2),
            prompt_embeds=sampling_inputs.positive["text"].float(),
            negative_prompt_embeds=negative["text"].float(),
            height=height * pipeline.vae_scale_factor,
            width=width * pipeline.vae_scale_factor,
            num_inference_steps=recipe.sampling.num_steps,
            guidance_scale=scale,
            generator=sampling_inputs.generators(),
            output_type="latent",
        )
        return drawn.images.unsqueeze(2)
