"""Interface of a model class of diffusers: what the task must know of it as teacher and as student."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from distiller.config.diffusion import DiffusionOptions
from distiller.errors import UserError

LatentShape = tuple[int, int, int, int]
"""(channels, frames, height, width) of a sample's latents; a picture has one frame."""


@dataclass(frozen=True)
class Origin:
    """The teacher's tensor from which a tensor of the student is initialised.

    Attributes:
        name: in the teacher.
        num_stacked: number of vectors that the tensor concatenates along its first axis, each as wide as the model.
    """

    name: str
    num_stacked: int = 1


class Architecture(ABC):
    """Works on configs and modules, not on files. Has no state, so that a trained module may refer to it.

    Latents are [B, C, F, H, W] in all methods.
    """

    model_class: ClassVar[Any]
    """The model class of diffusers."""

    part: ClassVar[str]
    """The model's folder in a pipeline."""

    keys_equal_to_teacher: ClassVar[Mapping[str, str]]
    """Config keys that must be equal in student and teacher -> their meaning, for messages."""

    cut_keys: ClassVar[Mapping[str, str]]
    """Keys of the recipe's `student` that cut a student out of the teacher -> the config keys that they set."""

    sizes_vary: ClassVar[bool]
    """Whether inputs of the blocks have other sizes from batch to batch, but for a last, smaller one."""

    @property
    def name(self) -> str:
        """Name of the model class."""
        return self.model_class.__name__

    def defaults(self) -> dict[str, Any]:
        """Values that diffusers uses for keys that a config.json leaves out."""
        parameters = inspect.signature(self.model_class.__init__).parameters
        return {name: parameter.default for name, parameter in parameters.items() if name != "self"}

    def check_config(self, config: Mapping[str, Any], origin: str) -> None:
        """Raises UserError unless the config, with defaults filled in, describes a model that the task can train.

        `origin` names the config in messages.
        """
        kind = config.get("_class_name", self.name)
        if kind != self.name:
            raise UserError(f"{origin} describes a {kind}; it must be a {self.name}")
        if config.get("quantization_config"):
            raise UserError(f"{origin} is of a quantised model; give the plain one (teacher.quantization quantises it)")
        self.check_numbers(config, origin)

    @abstractmethod
    def check_numbers(self, config: Mapping[str, Any], origin: str) -> None:
        """The checks of `check_config` that are specific to this class. Raises UserError."""

    @abstractmethod
    def check_student(self, config: Mapping[str, Any], teacher: Mapping[str, Any]) -> None:
        """Raises UserError where a key that may differ from the teacher's has a value that does not fit it."""

    @abstractmethod
    def check_size(self, owner: str, config: Mapping[str, Any], task: DiffusionOptions, shape: LatentShape) -> None:
        """Raises UserError where the model cannot take latents of this shape; `owner` names the model in messages."""

    @abstractmethod
    def block_names(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the submodules that a forward pass runs one after the other, in this order; most of the weights."""

    @abstractmethod
    def num_tokens(self, config: Mapping[str, Any], shape: LatentShape) -> int:
        """Number of tokens that the first block gets for one sample's latents."""

    @abstractmethod
    def feature_shape(self, config: Mapping[str, Any], block: int, shape: LatentShape) -> tuple[int, int]:
        """(tokens, width) of what `feature` returns for this block; blocks are counted from 0."""

    @abstractmethod
    def feature(self, output: Any) -> Tensor:
        """The part of a block's output that belongs to the latents, as [B, tokens, width]."""

    @abstractmethod
    def prepare(self, model: nn.Module, max_sequence_length: int) -> None:
        """Changes a new model in place so that it runs faster; weights, and results up to rounding, stay the same."""

    @abstractmethod
    def input_layer(self, model: nn.Module) -> nn.Module:
        """The layer that takes the latents. Inputs are cast to its dtype."""

    @abstractmethod
    def forward(self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """The prediction [B, C, F, H, W] in the latents' dtype.

        Args:
            latents: [B, C, F, H, W] in the dtype of `input_layer`.
            timesteps: [B] float32.
            conditions: the prompts' conditions by name, each [B, ...], in the dtype of `input_layer`.
        """

    @abstractmethod
    def finish_cut(self, config: dict[str, Any], teacher: Mapping[str, Any]) -> None:
        """Sets, in place, the config keys that depend on those that `cut_keys` has set."""

    @abstractmethod
    def origin(self, name: str, target: Tensor, config: Mapping[str, Any], teacher: Mapping[str, Any]) -> Origin | None:
        """The teacher's tensor that `target`, the tensor `name` of a cut student, is copied from.

        None where the tensor keeps its initial value. `config` is the student's.
        """


def check_builds(architecture: Architecture, config: Mapping[str, Any], origin: str) -> None:
    """Raises UserError unless diffusers can build a model from this config; builds it on the meta device."""
    try:
        with torch.device("meta"):
            architecture.model_class.from_config(dict(config))
    except Exception as error:
        kind = type(error).__name__
        raise UserError(f"{origin}: diffusers cannot build this model ({kind}: {error}); correct it") from error


def check_whole_numbers(config: Mapping[str, Any], keys: Sequence[str], origin: str) -> None:
    """Raises UserError unless the values of these keys are integers above 0."""
    for key in keys:
        if type(config[key]) is not int or config[key] < 1:
            raise UserError(f"{origin}: {key} is {config[key]!r}; it must be a whole number above 0")
