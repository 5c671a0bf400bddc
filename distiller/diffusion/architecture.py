"""A model class of diffusers as teacher and student: what the rest of the task must know of it."""

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
    """Which of the teacher's tensors a student's begins with; along its first axis it stacks so many vectors."""

    name: str
    num_stacked: int = 1


class Architecture(ABC):
    """Knows configs and modules, and no files. Holds no state, so that a trained module may carry it.

    Latents are [B, C, F, H, W] throughout.
    """

    model_class: ClassVar[Any]
    """Of diffusers."""

    part: ClassVar[str]
    """The model's folder in a pipeline."""

    shared: ClassVar[Mapping[str, str]]
    """Keys of the config in which student and teacher agree, with what they mean."""

    cuts: ClassVar[Mapping[str, str]]
    """Keys of `student` that cut a student out of the teacher, and the keys of the config that they set."""

    @property
    def name(self) -> str:
        """Of the model class."""
        return self.model_class.__name__

    def defaults(self) -> dict[str, Any]:
        """What diffusers takes for keys that a config.json leaves out."""
        parameters = inspect.signature(self.model_class.__init__).parameters
        return {name: parameter.default for name, parameter in parameters.items() if name != "self"}

    def check_config(self, config: Mapping[str, Any], origin: str) -> None:
        """Raises UserError unless this whole config describes a model that the task can train."""
        kind = config.get("_class_name", self.name)
        if kind != self.name:
            raise UserError(f"{origin} describes a {kind}; it must be a {self.name}")
        if config.get("quantization_config"):
            raise UserError(f"{origin} is of a quantised model; give the plain one (teacher.quantization quantises it)")
        self.check_numbers(config, origin)

    @abstractmethod
    def check_numbers(self, config: Mapping[str, Any], origin: str) -> None:
        """The rest of `check_config`, for a config of this class."""

    @abstractmethod
    def check_student(self, config: Mapping[str, Any], teacher: Mapping[str, Any]) -> None:
        """Raises UserError where a student differs from the teacher in what need not be equal but cannot be this."""

    @abstractmethod
    def check_size(self, owner: str, config: Mapping[str, Any], task: DiffusionOptions, shape: LatentShape) -> None:
        """Raises UserError where a model, the `owner`'s, cannot take latents of this shape."""

    @abstractmethod
    def block_names(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """The submodules that a forward pass runs one after the other, in that order; most of the weights."""

    @abstractmethod
    def num_tokens(self, config: Mapping[str, Any], shape: LatentShape) -> int:
        """Positions of one sample's latents that the first block sees, for throughput."""

    @abstractmethod
    def feature_shape(self, config: Mapping[str, Any], block: int, shape: LatentShape) -> tuple[int, int]:
        """(tokens, width) of what `feature` gives for this block."""

    @abstractmethod
    def feature(self, output: Any) -> Tensor:
        """What a block returned, as [B, tokens, width]: the part that belongs to the latents."""

    @abstractmethod
    def prepare(self, model: nn.Module, max_sequence_length: int) -> None:
        """Changes a new model's forward pass, not its weights, where that makes it faster; its results stay."""

    @abstractmethod
    def entry(self, model: nn.Module) -> nn.Module:
        """The layer that takes the latents; its dtype is what inputs are cast to."""

    @abstractmethod
    def forward(self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """The prediction, like the latents.

        Args:
            latents: [B, C, F, H, W] in the dtype of `entry`.
            timesteps: [B] float32.
            conditions: what the family makes of prompts, in the same dtype, by name.
        """

    @abstractmethod
    def finish_cut(self, config: dict[str, Any], teacher: Mapping[str, Any]) -> None:
        """Sets the keys that follow from those that `cuts` has set."""

    @abstractmethod
    def origin(self, name: str, target: Tensor, config: Mapping[str, Any], teacher: Mapping[str, Any]) -> Origin | None:
        """Where the tensor `name` of a student that is cut out of the teacher comes from; None: it keeps its own."""


def check_builds(architecture: Architecture, config: Mapping[str, Any], origin: str) -> None:
    """Raises UserError unless diffusers builds a model of this config; without weights."""
    try:
        with torch.device("meta"):
            architecture.model_class.from_config(dict(config))
    except Exception as error:
        kind = type(error).__name__
        raise UserError(f"{origin}: diffusers cannot build this model ({kind}: {error}); correct it") from error


def check_whole_numbers(config: Mapping[str, Any], keys: Sequence[str], origin: str) -> None:
    """Raises UserError unless these are whole numbers above 0."""
    for key in keys:
        if type(config[key]) is not int or config[key] < 1:
            raise UserError(f"{origin}: {key} is {config[key]!r}; it must be a whole number above 0")
