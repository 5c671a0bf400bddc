"""Interface of a pipeline family: how its files, prompts, pictures and noise become what the task works with."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from distiller.config.diffusion import DiffusionOptions, DiffusionRecipe, DiffusionStudent
from distiller.diffusion.architecture import Architecture, LatentShape
from distiller.diffusion.noise_process import NoiseProcess
from distiller.diffusion.pipeline import PipelineFiles
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.diffusion.vae import Vae
from distiller.errors import UserError

Condition = dict[str, Tensor]
"""The embedding of one prompt by name: `text` [n, D], whose n may differ, and other tensors of a fixed shape."""

TEXT = "text"


class Family(ABC):
    """A class of diffusers pipelines. Built from JSON files; a method that reads weights says so."""

    pipeline_class: ClassVar[Any]
    """The pipeline class of diffusers."""

    architecture: ClassVar[Architecture]

    network_parts: ClassVar[tuple[str, ...]]
    """Folders of the networks that predict; every pipeline has the first."""

    text_parts: tuple[str, ...]
    """Folders of the text encoders and tokenizers."""

    default_size_is_training_size: ClassVar[bool]
    """Whether `default_size` is the size that the networks were trained on, and not only a default of the call."""

    def __init__(self, files: PipelineFiles) -> None:
        """Raises UserError for a pipeline that diffusers accepts and this task cannot distil."""
        self.files = files
        self.check_files()

    @property
    def name(self) -> str:
        """Name of the pipeline class."""
        return self.pipeline_class.__name__

    @property
    def call_defaults(self) -> dict[str, Any]:
        """Default values of the arguments of the pipeline's `__call__`, by name."""
        parameters = inspect.signature(self.pipeline_class.__call__).parameters
        return {name: parameter.default for name, parameter in parameters.items()}

    @property
    def teacher_config(self) -> dict[str, Any]:
        """Config of the first network, against which the student's config is checked."""
        return self.files.configs[self.network_parts[0]]

    def stack(self, conditions: Sequence[Condition], length: int) -> dict[str, Tensor]:
        """Batches the conditions of several prompts: by name [B, ...], with `text` [B, L, D] padded by `pad`.

        `length` is the result of `text_length`.
        """
        return {
            name: self.pad([one[name] for one in conditions], length)
            if name == TEXT
            else torch.stack([one[name] for one in conditions])
            for name in conditions[0]
        }

    @abstractmethod
    def check_files(self) -> None:
        """Raises UserError for files that the task cannot distil. Sets `text_parts` if it depends on the files."""

    @abstractmethod
    def check_task(self, task: DiffusionOptions) -> None:
        """Raises UserError for values of `task` that these pipelines do not support."""

    @abstractmethod
    def check_student(self, student: DiffusionStudent, config: Mapping[str, Any]) -> None:
        """Raises UserError for a student that cannot draw in the teacher's pipeline.

        `config` is the student's; a saved one may be in a pipeline that predicts another quantity than the teacher's.
        """

    @abstractmethod
    def default_size(self) -> tuple[int, int, int]:
        """(frames, height, width) in pixels that the pipeline generates by default. Raises UserError."""

    @abstractmethod
    def pixel_size(self, shape: LatentShape) -> tuple[int, int, int]:
        """(frames, height, width) in pixels of decoded latents of this shape: the inverse of `latent_shape`."""

    @abstractmethod
    def latent_shape(self, num_frames: int, height: int, width: int) -> LatentShape:
        """The latents' shape for a size in pixels. Raises UserError for one that the pipeline cannot generate."""

    @abstractmethod
    def noise_process(self, shape: LatentShape) -> NoiseProcess:
        """The noise process for latents of this shape. Raises UserError for a scheduler that is not supported."""

    @abstractmethod
    def text_length(self, task: DiffusionOptions) -> int:
        """Tokens that the pipeline pads or cuts a prompt to: its `max_sequence_length`, or its tokenizer's limit."""

    @abstractmethod
    def max_tokens(self, tokenizers: Mapping[str, Any], length: int) -> dict[str, int]:
        """The most tokens of a text, including special ones, that each tokenizer keeps; `length` as in `stack`."""

    @abstractmethod
    def clean_prompts(self, prompts: Sequence[str]) -> list[str]:
        """Prompts after the pipeline's own cleaning, as its tokenizers get them."""

    def load_tokenizers(self) -> dict[str, Any]:
        """The pipeline's tokenizers by folder name. Reads no weights. Raises UserError for damaged files."""
        names = [name for name in self.text_parts if name.startswith("tokenizer")]
        root, tokenizers = self.files.fetch(*names), {}
        for name in names:
            try:
                library, kind = self.files.index[name]
                tokenizers[name] = getattr(import_module(library), kind).from_pretrained(root / name)
            except Exception as error:
                # Loaders of tokenizers raise many types of errors for a damaged file.
                raise UserError(
                    f"teacher.path: {self.files.location.given}: its {name} cannot be loaded "
                    f"({type(error).__name__}: {error}); copy the folder again"
                ) from error
        return tokenizers

    @abstractmethod
    def text_key(self) -> dict[str, Any]:
        """What embeddings depend on besides files, dtype and length, for JSON."""

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> Any:
        """The diffusers pipeline with nothing but its text encoders and tokenizers. Reads the encoders' weights."""
        # Under ZeRO-3 Accelerate registers the engine with transformers, whose from_pretrained then partitions every
        # model over all ranks. Text encoders are loaded by single ranks, which would wait for the other ranks forever.
        unset_hf_deepspeed_config()
        return self._read_text_encoder(dtype, device)

    @abstractmethod
    def _read_text_encoder(self, dtype: torch.dtype, device: torch.device) -> Any:
        """Loads what `load_text_encoder` returns."""

    @abstractmethod
    def embed(self, pipeline: Any, prompts: Sequence[str], length: int) -> list[Condition]:
        """The condition of each prompt, made by the pipeline of `load_text_encoder`, on its device and in its dtype."""

    @abstractmethod
    def pad(self, texts: Sequence[Tensor], length: int) -> Tensor:
        """Stacks texts [n_i, D] to [B, L, D], so that the network predicts the same as with the pipeline's padding."""

    @abstractmethod
    def longest_condition(self, texts: Sequence[str], length: int) -> Condition:
        """A condition of zeros, as long as the longest of what `embed` would return for these texts.

        Float32, on the CPU. Reads tokenizers and no weights; raises UserError for damaged files.
        """

    @abstractmethod
    def load_vae(self, device: torch.device) -> Vae:
        """The pipeline's VAE in float32 on the device. Reads its weights."""

    @abstractmethod
    def load_pipeline(self, student: Any) -> Any:
        """The diffusers pipeline with the student as its network, without text encoders and VAE."""

    @abstractmethod
    def draw(self, pipeline: Any, sampling_inputs: SamplingInputs, recipe: DiffusionRecipe, scale: float) -> Tensor:
        """Latents [B, C, F, H, W] float32 that the pipeline of `load_pipeline` generates at a guidance scale."""


def expand_conditions(conditions: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Expands one prompt's conditions [1, ...] to [count, ...], without a copy."""
    return {name: value.expand(count, *value.shape[1:]) for name, value in conditions.items()}
