"""Finds a saved image classifier of transformers: first its config and processor, then its weight files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoImageProcessor, PretrainedConfig

from distiller.errors import UserError
from distiller.storage.hub import check_listed, download, find_root, listed_files
from distiller.storage.json_files import read_json_object
from distiller.storage.packaged_files import local_path
from distiller.storage.saved_model import TRANSFORMERS_NAME
from distiller.storage.stages import digest_files
from distiller.vision.structure import Structure, inspect_model
from distiller.vision.weight_files import check_weights, stored_files, weights_among

Picture = np.ndarray
"""uint8 [H, W, C]; C is the model's number of channels."""

UNSTABLE_KEYS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
"""Keys of a config that do not change outputs: the library's version, the config's path, the dtype of saved weights."""


@dataclass(frozen=True)
class ClassifierFiles:
    """A classifier as its JSON files describe it.

    Attributes:
        source: `teacher.path: PATH` as in the recipe, for messages.
        root: the folder that holds config.json.
        repository: hub id and revision; None for a folder.
        subfolder: of the folder or repository, where the model is; None at its root.
        structure: of the model of this config.
        labels: names of the classes, in the order of the logits.
    """

    source: str
    root: Path
    repository: tuple[str, str | None] | None
    subfolder: str | None
    config: PretrainedConfig
    structure: Structure
    labels: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        """The config's values that are no defaults, without `UNSTABLE_KEYS`; for keys and digests."""
        return _without_unstable_keys(self.config.to_diff_dict())

    def fetch(self) -> Path:
        """Downloads the weights if they are on a hub, and returns the folder. Reads headers only.

        Raises:
            UserError: there are no weights in safetensors, or one of the files is incomplete.
        """
        if self.repository is not None:
            name, revision = self.repository
            prefix = f"{self.subfolder}/" if self.subfolder else ""
            download("teacher", name, revision, [f"{prefix}*.safetensors", f"{prefix}*.json"])
        check_weights(self.root, self.source)
        return self.root

    def check_listed(self) -> None:
        """Raises UserError where the repository has weights only in files that are not read. Downloads no file."""
        if self.repository is not None:
            check_listed(listed_files(*self.repository), self.subfolder or "", TRANSFORMERS_NAME, self.source)

    def found_weights(self) -> str | None:
        """The name of a file with weights, in any format, here or on the hub; None where there is none."""
        found = weights_among(file.name for file in self.root.iterdir())
        if found is None and self.repository is not None:
            paths = map(PurePosixPath, listed_files(*self.repository))
            found = weights_among(path.name for path in paths if path.parent == PurePosixPath(self.subfolder or ""))
        return found

    def weight_files(self) -> list[Path]:
        """The safetensors files as they were saved; see `fetch`."""
        return stored_files(self.fetch())

    def digest(self) -> str:
        """The content digest of weights and config. May read whole files; see `fetch`."""
        return digest_files([*self.weight_files(), self.root / "config.json"])


def find_folder(path: str, revision: str | None, subfolder: str | None) -> tuple[Path, str | None]:
    """The folder that `teacher.path` names, with its JSON files, and the hub id or None. Raises UserError."""
    folder, is_hub = find_root("teacher", path, local_path(path), revision, ["*.json"], "config.json")
    return folder / subfolder if subfolder else folder, path if is_hub else None


def read_config(file: Path, origin: str) -> PretrainedConfig:
    """The config of a classifier. Raises UserError where the file is missing, no JSON, or of another kind of model."""
    missing = f"{origin}: {file.name} does not exist; give a saved model of the transformers library"
    content = read_json_object(file, f"{origin}: {file.name}", missing)
    if not isinstance(content.get("model_type"), str):
        raise UserError(f"{origin}: {file.name} has no model_type, so it is not a model's config of transformers")
    if content.get("quantization_config"):
        raise UserError(f"{origin}: {file.name} is of a quantised model; give the plain one")
    if (problem := content.get("problem_type")) not in (None, "single_label_classification"):
        raise UserError(
            f"{origin}: problem_type of {file.name} is {problem}, and the task compares distributions over classes of "
            "which each picture has one; give a classifier of single_label_classification"
        )
    named = content.get("architectures") or []
    if named and not any("ForImageClassification" in str(name) for name in named):
        raise UserError(
            f"{origin}: {file.name} describes {named[0]}; task classification needs ...ForImageClassification"
        )
    try:
        # JSON has no infinities: the file holds objects for them.
        return AutoConfig.for_model(**PretrainedConfig._decode_special_floats(content))
    except Exception as error:
        # Each config class raises errors of its own types for wrong values.
        raise UserError(f"{origin}: transformers cannot read {file.name} ({_line(error)}); correct it") from error


def inspect_config(config: PretrainedConfig, picture_shape: tuple[int, int, int], origin: str) -> Structure:
    """The structure of a config's model. Raises UserError where it does not run on pictures of shape (C, H, W)."""
    try:
        return inspect_model(config, picture_shape)
    except Exception as error:
        # The model's layers raise errors of many types.
        shape = " x ".join(map(str, picture_shape))
        raise UserError(
            f"{origin}: the model of its config does not run on pictures of {shape} ({_line(error)})"
        ) from error


def find_classifier(path: str, revision: str | None, subfolder: str | None, processor: Processor) -> ClassifierFiles:
    """Finds and checks the teacher, reading JSON files only. Raises UserError in one line."""
    root, repository = find_folder(path, revision, subfolder)
    origin = f"teacher.path: {path}"
    config = read_config(root / "config.json", origin)
    structure = inspect_config(config, processor.shape, origin)
    return ClassifierFiles(
        source=origin,
        root=root,
        repository=None if repository is None else (repository, revision),
        subfolder=subfolder,
        config=config,
        structure=structure,
        labels=labels_of(config, structure.num_logits, origin),
    )


def labels_of(config: PretrainedConfig, num_logits: int, origin: str) -> tuple[str, ...]:
    """The names of the classes in the order of the logits. Raises UserError where id2label does not name them all."""
    names: Mapping[int, str] = {int(index): str(name) for index, name in (config.id2label or {}).items()}
    if sorted(names) != list(range(num_logits)):
        raise UserError(
            f"{origin}: id2label names {len(names)} classes and the model has {num_logits}; correct config.json"
        )
    return tuple(names[index] for index in range(num_logits))


class Processor:
    """Makes the model's input from a picture: resizes, crops, scales and normalises, as preprocessor_config.json says.

    Computed with PIL and numpy on the CPU, so that the numbers do not depend on whether torchvision is installed.

    Attributes:
        shape: (C, H', W') of every input.
        num_channels: of a picture.
    """

    def __init__(self, root: Path, num_channels: int, origin: str) -> None:
        """Raises UserError where the folder describes no processor, or one whose outputs differ in size."""
        if not (root / "preprocessor_config.json").is_file():
            raise UserError(f"{origin} has no preprocessor_config.json, which says how pictures are scaled; add it")
        try:
            self._processor = AutoImageProcessor.from_pretrained(root, backend="pil", local_files_only=True)
            shapes = {
                self(np.zeros((*size, num_channels), np.uint8)).shape for size in ((64, 64), (48, 96), (300, 200))
            }
        except Exception as error:
            # Processors raise errors of many types.
            raise UserError(f"{origin}: its preprocessor_config.json cannot be used ({_line(error)})") from error
        if len(shapes) > 1:
            raise UserError(
                f"{origin}: its preprocessor_config.json makes inputs of several sizes ({sorted(shapes)}), which no "
                "batch can hold; set do_center_crop, or a size with height and width"
            )
        channels, height, width = shapes.pop()
        self.shape = (channels, height, width)
        self.num_channels = num_channels

    def __call__(self, picture: Picture) -> np.ndarray:
        """uint8 [H, W, C] -> the model's input, float32 [C, H', W']."""
        values = self._processor(images=picture, input_data_format="channels_last", return_tensors="np")
        return np.asarray(values["pixel_values"][0], dtype=np.float32)

    def describe(self) -> dict[str, Any]:
        """Its settings, for keys and digests."""
        return self._processor.to_dict()

    def save(self, folder: Path) -> None:
        """Writes preprocessor_config.json."""
        self._processor.save_pretrained(folder)


def _without_unstable_keys(values: dict[str, Any]) -> dict[str, Any]:
    """The values without `UNSTABLE_KEYS`, also in nested configs."""
    return {
        key: _without_unstable_keys(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if key not in UNSTABLE_KEYS
    }


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
