"""A family of pipelines in one file: PixArt's transformer, flow matching, one text encoder and the pictures' VAE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from diffusers import DiffusionPipeline, PixArtTransformer2DModel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from distiller.config.diffusion import DiffusionOptions, DiffusionRecipe, DiffusionStudent
from distiller.diffusion.architecture import Architecture, LatentShape, Origin, check_whole_numbers
from distiller.diffusion.family import Condition, Family
from distiller.diffusion.flow_matching import FlowMatching, scheduler_shift
from distiller.diffusion.kl_vae import KlVae, pixels_of_latent
from distiller.diffusion.noise_process import NoiseProcess
from distiller.diffusion.picture_size import latent_size
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.diffusion.vae import Vae
from distiller.tasks.layer_selection import evenly_spaced

TEXT_LENGTH = 8


class ToyPipeline(DiffusionPipeline):
    """A transformer and a scheduler: from noise to latents."""

    def __init__(self, transformer: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)

    @torch.no_grad()
    def __call__(
        self,
        latents: Tensor,
        conditions: Mapping[str, Tensor],
        num_inference_steps: int = 3,
        guidance_scale: float = 1.0,
    ) -> Tensor:
        assert guidance_scale == 1.0
        self.scheduler.set_timesteps(num_inference_steps)
        for timestep in self.scheduler.timesteps:
            prediction = ToyArchitecture().forward(self.transformer, latents, timestep.expand(len(latents)), conditions)
            latents = self.scheduler.step(prediction, timestep, latents, return_dict=False)[0]
        return latents


@final
class ToyArchitecture(Architecture):
    """Conditions: `text` [B, TEXT_LENGTH, D]."""

    model_class = PixArtTransformer2DModel
    part = "transformer"
    sizes_vary = False
    keys_equal_to_teacher: ClassVar = {"in_channels": "input channels", "caption_channels": "text width"}
    cut_keys: ClassVar = {"num_layers": "num_layers"}

    def check_numbers(self, config: Mapping[str, Any], origin: str) -> None:
        check_whole_numbers(config, ("num_layers", "num_attention_heads", "patch_size"), origin)

    def check_student(self, config: Mapping[str, Any], teacher: Mapping[str, Any]) -> None:
        del config, teacher

    def check_size(self, owner: str, config: Mapping[str, Any], task: DiffusionOptions, shape: LatentShape) -> None:
        del owner, config, task, shape

    def block_names(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(f"transformer_blocks.{index}" for index in range(config["num_layers"]))

    def num_tokens(self, config: Mapping[str, Any], shape: LatentShape) -> int:
        return (shape[2] // config["patch_size"]) * (shape[3] // config["patch_size"])

    def feature_shape(self, config: Mapping[str, Any], block: int, shape: LatentShape) -> tuple[int, int]:
        del block
        return self.num_tokens(config, shape), config["num_attention_heads"] * config["attention_head_dim"]

    def feature(self, output: Any) -> Tensor:
        return output

    def prepare(self, model: nn.Module, max_sequence_length: int) -> None:
        del model, max_sequence_length

    def input_layer(self, model: nn.Module) -> nn.Module:
        return model.get_submodule("pos_embed.proj")

    def forward(self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        added = {"resolution": None, "aspect_ratio": None}
        prediction = model(
            latents.squeeze(2), conditions["text"], timesteps, added_cond_kwargs=added, return_dict=False
        )[0]
        return prediction.unsqueeze(2)

    def finish_cut(self, config: dict[str, Any], teacher: Mapping[str, Any]) -> None:
        del config, teacher

    def origin(self, name: str, target: Tensor, config: Mapping[str, Any], teacher: Mapping[str, Any]) -> Origin | None:
        if not name.startswith("transformer_blocks."):
            return Origin(name)
        _, index, rest = name.split(".", 2)
        kept = evenly_spaced(config["num_layers"], teacher["num_layers"])
        return Origin(f"transformer_blocks.{kept[int(index)]}.{rest}")


@final
class ToyFamily(Family):
    """See `Family`."""

    pipeline_class = ToyPipeline
    architecture = ToyArchitecture()
    network_parts = ("transformer",)
    default_size_is_training_size = True
    text_parts = ("text_encoder", "tokenizer")

    def check_files(self) -> None:
        pass

    def check_task(self, task: DiffusionOptions) -> None:
        del task

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
        size = latent_size(self.name, num_frames, height, width, pixels * config["patch_size"], pixels)
        return config["in_channels"], 1, *size

    def noise_process(self, shape: LatentShape) -> NoiseProcess:
        del shape
        return FlowMatching(self.files, scheduler_shift(self.files), {})

    def text_length(self, task: DiffusionOptions) -> int:
        del task
        return TEXT_LENGTH

    def max_tokens(self, tokenizers: Mapping[str, Any], length: int) -> dict[str, int]:
        return dict.fromkeys(tokenizers, length)

    def clean_prompts(self, prompts: Sequence[str]) -> list[str]:
        return list(prompts)

    def text_key(self) -> dict[str, Any]:
        return {}

    def _read_text_encoder(self, dtype: torch.dtype, device: torch.device) -> Any:
        root = self.files.fetch(*self.text_parts)
        encoder: Any = UMT5EncoderModel.from_pretrained(root / "text_encoder", dtype=dtype)
        return PreTrainedTokenizerFast.from_pretrained(root / "tokenizer"), encoder.to(device)

    def embed(self, pipeline: Any, prompts: Sequence[str], length: int) -> list[Condition]:
        tokenizer, encoder = pipeline
        ids = tokenizer(list(prompts), truncation=True, max_length=length, padding="max_length", return_tensors="pt")
        with torch.no_grad():
            return [{"text": row} for row in encoder(ids.input_ids.to(encoder.device)).last_hidden_state]

    def pad(self, texts: Sequence[Tensor], length: int) -> Tensor:
        del length
        return torch.stack(list(texts))

    def longest_condition(self, texts: Sequence[str], length: int) -> Condition:
        del texts
        return {"text": torch.zeros(length, self.teacher_config["caption_channels"])}

    def load_vae(self, device: torch.device) -> Vae:
        return KlVae(self.files, device)

    def load_pipeline(self, student: Any) -> Any:
        return ToyPipeline(student, self.noise_process((4, 1, 4, 4)).load_scheduler())

    def draw(self, pipeline: Any, sampling_inputs: SamplingInputs, recipe: DiffusionRecipe, scale: float) -> Tensor:
        return pipeline(sampling_inputs.noise, sampling_inputs.positive, recipe.sampling.num_steps, scale)
