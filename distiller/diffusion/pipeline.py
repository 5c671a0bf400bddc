"""The files of a diffusers pipeline in a folder or on a hub: its JSON files, and its components on demand."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distiller.config.teacher import Teacher
from distiller.data.folders import files_below
from distiller.diffusion.architecture import Architecture
from distiller.errors import UserError
from distiller.storage.hub import check_listed, download, find_root, is_offline, is_other_form, listed_files
from distiller.storage.json_files import read_json_object
from distiller.storage.packaged_files import local_path
from distiller.storage.saved_model import (
    DIFFUSERS_NAME,
    TRANSFORMERS_NAME,
    check_whole,
    diffusers_files,
    transformers_files,
)
from distiller.storage.stages import digest_files

ORIGINAL_LAYOUT_MARKS = ("Wan2.*_VAE.pth", "models_t5_*.pth", "high_noise_model", "low_noise_model")
"""Files and folders that show the layout of Wan's own code."""

Repository = tuple[str, str | None, str | None]
"""(name, revision, subfolder) on a hub."""


@dataclass(frozen=True)
class Location:
    """Where a pipeline is.

    Attributes:
        source: `teacher.path`.
        given: `teacher.path` with `teacher.subfolder`, for messages.
        root: the folder that holds model_index.json.
        repository: None for a folder.
    """

    source: str
    given: str
    root: Path
    repository: Repository | None


@dataclass(frozen=True)
class PipelineFiles:
    """The content of a pipeline's JSON files.

    Attributes:
        index: of model_index.json.
        configs: of the networks that predict, by folder name, with diffusers' defaults filled in.
    """

    location: Location
    index: dict[str, Any]
    configs: dict[str, dict[str, Any]]
    vae_config: dict[str, Any]
    scheduler_config: dict[str, Any]

    @property
    def source(self) -> str:
        """`teacher.path` of the recipe."""
        return self.location.source

    @property
    def root(self) -> Path:
        """The folder that holds model_index.json."""
        return self.location.root

    @property
    def num_train_timesteps(self) -> int:
        """Length of the training schedule, from data to noise, in timesteps."""
        return int(self.scheduler_config.get("num_train_timesteps", 1000))

    @property
    def boundary_ratio(self) -> float | None:
        """The share of the schedule, from its clean end, that the second network predicts; None with one network."""
        return self.index.get("boundary_ratio")

    @property
    def boundary_timestep(self) -> float | None:
        """At this timestep and above the first network predicts, below it the second; None with one network."""
        return None if self.boundary_ratio is None else self.boundary_ratio * self.num_train_timesteps

    def has(self, part: str) -> bool:
        """Whether model_index.json names this component."""
        return self.index.get(part) not in (None, [None, None])

    def fetch(self, *parts: str) -> Path:
        """Downloads whole component folders where the pipeline is on a hub; returns `root`. Raises UserError."""
        if self.location.repository is not None:
            name, revision, subfolder = self.location.repository
            prefix = f"{subfolder}/" if subfolder else ""
            download("teacher", name, revision, [f"{prefix}{part}/*" for part in parts])
        return self.root

    def digest(self, *parts: str) -> str:
        """The content digest of whole component folders, weights included. Downloads them from a hub.

        Files that are never read do not count: they are present in the hub's cache only if something else has
        downloaded them, and may be missing in a copy of the folder.
        """
        root = self.fetch(*parts)
        return digest_files(file for part in parts for file in files_below(root / part) if not is_other_form(file.name))


def locate(teacher: Teacher) -> Location:
    """Finds the teacher's pipeline, and downloads its JSON files if it is on a hub. Raises UserError."""
    local = local_path(teacher.path)
    path, is_hub = find_root("teacher", teacher.path, local, teacher.revision, ["*.json"], "model_index.json")
    repository = (teacher.path, teacher.revision, teacher.subfolder) if is_hub else None
    given = f"{teacher.path} (subfolder {teacher.subfolder})" if teacher.subfolder else teacher.path
    return Location(teacher.path, given, path / teacher.subfolder if teacher.subfolder else path, repository)


def read_files(
    location: Location, index: dict[str, Any], architecture: Architecture, network_parts: tuple[str, ...]
) -> PipelineFiles:
    """Reads and checks the JSON files of a pipeline; `index` is the content of model_index.json. Raises UserError."""
    root, given, configs = location.root, location.given, {}
    for name in network_parts:
        if index.get(name) not in (None, [None, None]):
            configs[name] = architecture.defaults() | read_json(root / name / "config.json", given)
            architecture.check_config(configs[name], f"teacher.path: {given}: {name}/config.json")
    if network_parts[0] not in configs:
        raise UserError(f"teacher.path: {given} has no {network_parts[0]}; its model_index.json must name one")
    return PipelineFiles(
        location=location,
        index=index,
        configs=configs,
        vae_config=read_json(root / "vae" / "config.json", given),
        scheduler_config=read_json(root / "scheduler" / "scheduler_config.json", given),
    )


def check_parts(files: PipelineFiles, text_parts: tuple[str, ...]) -> None:
    """Raises UserError unless networks, VAE and text encoders are present.

    Files in a folder must be complete, of which their headers are read; for a hub, the names of its files are compared.
    """
    location = files.location
    if location.repository is not None and not is_offline():
        _check_listed(files, text_parts)
        return
    for name in text_parts:
        if name.startswith("tokenizer"):
            read_json(location.root / name / "tokenizer_config.json", location.given)
    encoders = [name for name in text_parts if not name.startswith("tokenizer")]
    for name in (*files.configs, *encoders, "vae"):
        check_weights(location.root / name, f"teacher.path: {location.given}")


def _check_listed(files: PipelineFiles, text_parts: tuple[str, ...]) -> None:
    """Raises UserError where a hub has a component's weights only under names that its library does not read."""
    assert files.location.repository is not None
    name, revision, subfolder = files.location.repository
    names = listed_files(name, revision)
    encoders = [part for part in text_parts if not part.startswith("tokenizer")]
    wanted = {**dict.fromkeys((*files.configs, "vae"), DIFFUSERS_NAME), **dict.fromkeys(encoders, TRANSFORMERS_NAME)}
    for part, library_name in wanted.items():
        folder = f"{subfolder}/{part}" if subfolder else part
        check_listed(names, folder, library_name, f"teacher.path: {files.location.given}: {part}")


def model_files(folder: Path) -> list[Path]:
    """The safetensors files of a saved model that diffusers reads. Raises UserError where there are none."""
    return diffusers_files(folder, str(folder))


def check_weights(folder: Path, origin: str) -> None:
    """Raises UserError unless all safetensors files of a saved model are complete. Reads their headers only."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # Reported elsewhere: a student's config is read before this, and a component's is read by its library.
        config = {}
    list_files = transformers_files if "model_type" in config else diffusers_files
    check_whole(list_files(folder, f"{origin}: {folder.name}"), f"{origin}: {folder.name}/")


def read_index(location: Location) -> dict[str, Any]:
    """The content of model_index.json. Raises UserError where the folder is not a diffusers pipeline."""
    root, given = location.root, location.given
    if not (root / "model_index.json").is_file():
        if any(next(root.glob(mark), None) for mark in ORIGINAL_LAYOUT_MARKS) or _is_original_config(root):
            raise UserError(
                f"teacher.path: {given} is in Wan's original layout; use its diffusers form (on the hub: a name that "
                "ends in -Diffusers) or convert it with diffusers' scripts/convert_wan_to_diffusers.py"
            )
        if (root / "config.json").is_file():
            raise UserError(f"teacher.path: {given} is a single model; give the pipeline folder above it")
        raise UserError(
            f"teacher.path: {given} has no model_index.json, so it is not a diffusers pipeline; give the folder that "
            "holds one"
        )
    return read_json(root / "model_index.json", given)


def _is_original_config(root: Path) -> bool:
    """Whether `config.json` is of Wan's own code: the only sign of its layout among a hub's JSON files."""
    file = root / "config.json"
    return file.is_file() and read_json(file, os.fspath(root)).get("_class_name") == "WanModel"


def read_json(file: Path, given: str) -> dict[str, Any]:
    """A JSON file of the pipeline. Raises UserError where it is missing or is not a JSON object.

    `given` names the pipeline in messages.
    """
    name = f"{file.parent.name}/{file.name}"
    missing = f"teacher.path: {given} lacks {name}; give a complete pipeline folder"
    return read_json_object(file, f"teacher.path: {given}: {name}", missing)
