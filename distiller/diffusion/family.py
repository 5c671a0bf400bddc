"""A class of pipelines: how its files, prompts, pictures and noise become what the task works with."""

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
"""What one prompt becomes: `text` [n, D], and other tensors of one shape for all prompts."""

TEXT = "text"


class Family(ABC):
    """Built from a pipeline's descriptions; its methods say which weights they read."""

    pipeline_class: ClassVar[Any]
    """Of diffusers."""

    architecture: ClassVar[Architecture]

    network_parts: ClassVar[tuple[str, ...]]
    """Folders of a pipeline in which networks that predict may lie; the first is there always."""

    text_parts: tuple[str, ...]
    """Folders of what embeds prompts."""

    has_own_size: ClassVar[bool]
    """Whether `own_size` is that of the pictures its networks learnt from, and no mere argument of the call."""

    def __init__(self, files: PipelineFiles) -> None:
        """Raises UserError for a pipeline that its class allows and the task does not."""
        self.files = files
        self.check_files()

    @property
    def name(self) -> str:
        """Of the pipeline's class."""
        return self.pipeline_class.__name__

    @property
    def call_defaults(self) -> dict[str, Any]:
        """What the pipeline's call takes for arguments that it is not given."""
        parameters = inspect.signature(self.pipeline_class.__call__).parameters
        return {name: parameter.default for name, parameter in parameters.items()}

    @property
    def teacher_config(self) -> dict[str, Any]:
        """Of the network that students are compared with: the first."""
        return self.files.configs[self.network_parts[0]]

    def stack(self, conditions: Sequence[Condition], length: int) -> dict[str, Tensor]:
        """Several prompts' conditions as one batch, by name; `length` is that of `text_length`."""
        return {
            name: self.pad([one[name] for one in conditions], length)
            if name == TEXT
            else torch.stack([one[name] for one in conditions])
            for name in conditions[0]
        }

    @abstractmethod
    def check_files(self) -> None:
        """Raises UserError; sets `text_parts`."""

    @abstractmethod
    def check_task(self, task: DiffusionOptions) -> None:
        """Raises UserError for keys that these pipelines cannot follow."""

    @abstractmethod
    def check_student(self, student: DiffusionStudent) -> None:
        """Raises UserError for a saved student whose own pipeline says that it predicts something else."""

    @abstractmethod
    def own_size(self) -> tuple[int, int, int]:
        """Frames, height and width that the pipeline draws when it is not told. Raises UserError."""

    @abstractmethod
    def drawn_size(self, shape: LatentShape) -> tuple[int, int, int]:
        """Frames, height and width of latents of this shape: the inverse of `latent_shape`."""

    @abstractmethod
    def latent_shape(self, num_frames: int, height: int, width: int) -> LatentShape:
        """Of a sample of so many frames and pixels; UserError for a size that the pipeline cannot draw."""

    @abstractmethod
    def noise_process(self, shape: LatentShape) -> NoiseProcess:
        """How latents of this shape are noised. Raises UserError for a scheduler that does something else."""

    @abstractmethod
    def text_length(self, task: DiffusionOptions) -> int:
        """Rows that the pipeline gives each prompt's text."""

    @abstractmethod
    def kept_tokens(self, tokenizers: Mapping[str, Any], length: int) -> dict[str, int]:
        """How many tokens of a text, special ones among them, each tokenizer keeps; `length` as in `stack`."""

    @abstractmethod
    def cleaned(self, prompts: Sequence[str]) -> list[str]:
        """Prompts as the pipeline hands them to its tokenizers."""

    def load_tokenizers(self) -> dict[str, Any]:
        """The pipeline's tokenizers by their folders, as it loads them. Reads no weights. Raises UserError."""
        names = [name for name in self.text_parts if name.startswith("tokenizer")]
        root, tokenizers = self.files.fetch(*names), {}
        for name in names:
            try:
                library, kind = self.files.index[name]
                tokenizers[name] = getattr(import_module(library), kind).from_pretrained(root / name)
            except Exception as error:
                # Their loaders raise whatever a damaged file makes them stumble over.
                raise UserError(
                    f"teacher.path: {self.files.location.given}: its {name} cannot be loaded "
                    f"({type(error).__name__}: {error}); copy the folder again"
                ) from error
        return tokenizers

    @abstractmethod
    def text_key(self) -> dict[str, Any]:
        """What else than files, dtype and length embeddings depend on, for JSON."""

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> Any:
        """The pipeline with what embeds prompts, and nothing else. Reads those weights."""
        # Under ZeRO-3 Accelerate tells transformers, whose from_pretrained then partitions every model over the ranks:
        # these are loaded by one rank alone, which would wait for the others for ever.
        unset_hf_deepspeed_config()
        return self._read_text_encoder(dtype, device)

    @abstractmethod
    def _read_text_encoder(self, dtype: torch.dtype, device: torch.device) -> Any:
        """What `load_text_encoder` returns."""

    @abstractmethod
    def embed(self, pipeline: Any, prompts: Sequence[str], length: int) -> list[Condition]:
        """The prompts as the pipeline of `load_text_encoder` embeds them, on its device and in its dtype."""

    @abstractmethod
    def pad(self, texts: Sequence[Tensor], length: int) -> Tensor:
        """Stacks [n_i, D] texts to [B, L, D], of which the network makes what it makes of `length` rows."""

    @abstractmethod
    def load_vae(self, device: torch.device) -> Vae:
        """The pipeline's VAE in float32. Reads its weights."""

    @abstractmethod
    def load_pipeline(self, student: Any) -> Any:
        """The pipeline with the student in the teacher's place, and without text encoder and VAE."""

    @abstractmethod
    def draw(self, pipeline: Any, conditions: SamplingInputs, recipe: DiffusionRecipe, scale: float) -> Tensor:
        """What the library's own pipeline draws at a guidance scale: latents [B, C, F, H, W] float32."""


def expanded(conditions: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """One prompt's conditions, [1, ...], for so many samples."""
    return {name: value.expand(count, *value.shape[1:]) for name, value in conditions.items()}
