"""A diffusers WanPipeline on disk or on a hub: what it is, before any weight is read; then its parts, one by one."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers import WanTransformer3DModel
from safetensors import SafetensorError, safe_open

from distiller.errors import UserError
from distiller.hub import download, looks_like_hub_id
from distiller.resources import local_path
from distiller.stages import digest_files
from distiller.teacher_config import Teacher

TRANSFORMERS = ("transformer", "transformer_2")
ORIGINAL_LAYOUT_MARKS = ("Wan2.*_VAE.pth", "models_t5_*.pth", "high_noise_model", "low_noise_model")
WHOLE_NUMBERS = (
    *("num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "text_dim", "freq_dim", "ffn_dim"),
    *("num_layers", "rope_max_seq_len"),
)


@dataclass(frozen=True)
class WanFiles:
    """A WanPipeline's descriptions (JSON only). `root` holds model_index.json."""

    source: str
    root: Path
    repository: tuple[str, str | None, str | None] | None
    transformer_configs: dict[str, dict[str, Any]]
    vae_config: dict[str, Any]
    scheduler_config: dict[str, Any]
    boundary_ratio: float | None

    @property
    def num_train_timesteps(self) -> int:
        """How many timesteps sigma = 1 stands for."""
        return int(self.scheduler_config.get("num_train_timesteps", 1000))

    @property
    def boundary_timestep(self) -> float | None:
        """From here up `transformer` predicts, below it `transformer_2`; None with one transformer."""
        return None if self.boundary_ratio is None else self.boundary_ratio * self.num_train_timesteps

    @property
    def scheduler_shift(self) -> float:
        """The shift of the pipeline's own sampling schedule, under whichever name the scheduler gives it."""
        return float(self.scheduler_config.get("shift", self.scheduler_config.get("flow_shift", 1.0)) or 1.0)

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(channels, frames, height, width) of a sample's latents; UserError for a size the pipeline cannot draw."""
        spatial = int(self.vae_config.get("scale_factor_spatial", 8))
        temporal = int(self.vae_config.get("scale_factor_temporal", 4))
        config = self.transformer_configs["transformer"]
        _, patch_height, patch_width = config["patch_size"]
        for name, pixels, step in (("height", height, spatial * patch_height), ("width", width, spatial * patch_width)):
            if pixels % step or pixels % 16:
                raise UserError(f"task.{name} {pixels} is not a multiple of {max(step, 16)}, as this pipeline needs")
        if extra := (num_frames - 1) % temporal:
            lower = num_frames - extra
            raise UserError(
                f"task.num_frames {num_frames} is not {temporal} k + 1, as this pipeline's VAE needs; give {lower} or "
                f"{lower + temporal}"
            )
        return int(config["in_channels"]), (num_frames - 1) // temporal + 1, height // spatial, width // spatial

    def fetch(self, *parts: str) -> Path:
        """Makes whole component folders present (downloads them from a hub) and returns `root`."""
        if self.repository is not None:
            name, revision, subfolder = self.repository
            prefix = f"{subfolder}/" if subfolder else ""
            download("teacher", name, revision, [f"{prefix}{part}/*" for part in parts])
        return self.root

    def digest(self, *parts: str) -> str:
        """The content digest of whole component folders (weights included)."""
        root = self.fetch(*parts)
        return digest_files(file for part in parts for file in (root / part).rglob("*") if file.is_file())


def find_pipeline(teacher: Teacher) -> WanFiles:
    """Finds and checks the teacher's pipeline, reading JSON files only. Raises UserError in one line."""
    path, repository = local_path(teacher.path), None
    if not os.path.exists(path):
        if not looks_like_hub_id(teacher.path):
            raise UserError(f"teacher.path: {teacher.path} is neither a folder nor a hub id (owner/name)")
        repository = (teacher.path, teacher.revision, teacher.subfolder)
        path = download("teacher", teacher.path, teacher.revision, ["*.json"])
    elif not path.is_dir():
        raise UserError(f"teacher.path: {teacher.path} is a file; give the folder that holds model_index.json")
    elif teacher.revision is not None:
        raise UserError(f"teacher.revision is {teacher.revision} and teacher.path {teacher.path} a folder; remove it")
    given = f"{teacher.path} (subfolder {teacher.subfolder})" if teacher.subfolder else teacher.path
    root = path / teacher.subfolder if teacher.subfolder else path
    index = _read_index(root, given)
    configs = {}
    for name in TRANSFORMERS:
        if index.get(name) not in (None, [None, None]):
            configs[name] = transformer_defaults() | _read_json(root / name / "config.json", given)
            check_transformer_config(configs[name], f"teacher.path: {given}: {name}/config.json")
    if "transformer" not in configs:
        raise UserError(f"teacher.path: {given} has no transformer; its model_index.json must name one")
    boundary = index.get("boundary_ratio")
    if ("transformer_2" in configs) != (boundary is not None):
        raise UserError(
            f"teacher.path: {given} has {len(configs)} transformer(s) and boundary_ratio {boundary}; model_index.json "
            "must name both transformer_2 and boundary_ratio, or neither"
        )
    if boundary is not None and not (isinstance(boundary, float) and 0 < boundary < 1):
        raise UserError(f"teacher.path: {given}: boundary_ratio is {boundary!r}; it must lie between 0 and 1")
    files = WanFiles(
        source=teacher.path,
        root=root,
        repository=repository,
        transformer_configs=configs,
        vae_config=_read_json(root / "vae" / "config.json", given),
        scheduler_config=_read_json(root / "scheduler" / "scheduler_config.json", given),
        boundary_ratio=boundary,
    )
    if repository is None:
        _read_json(root / "tokenizer" / "tokenizer_config.json", given)
        for name in (*configs, "text_encoder", "vae"):
            check_weights(root / name, f"teacher.path: {given}")
    return files


def transformer_defaults() -> dict[str, Any]:
    """What diffusers takes for keys that a transformer's config.json leaves out."""
    parameters = inspect.signature(WanTransformer3DModel.__init__).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name != "self"}


def check_transformer_config(config: Mapping[str, Any], origin: str) -> None:
    """Raises UserError unless this whole config describes a text-to-image/video Wan transformer."""
    kind = config.get("_class_name", "WanTransformer3DModel")
    if kind != "WanTransformer3DModel":
        raise UserError(f"{origin} describes a {kind}; it must be a WanTransformer3DModel")
    if config.get("quantization_config"):
        raise UserError(f"{origin} is of a quantised model; give the plain one (teacher.quantization quantises it)")
    for key in WHOLE_NUMBERS:
        if type(config[key]) is not int or config[key] < 1:
            raise UserError(f"{origin}: {key} is {config[key]!r}; it must be a whole number above 0")
    patch = config["patch_size"]
    if not isinstance(patch, list | tuple) or len(patch) != 3 or any(type(n) is not int or n < 1 for n in patch):
        raise UserError(f"{origin}: patch_size is {patch!r}; it must be three whole numbers above 0")
    if config["attention_head_dim"] % 2:
        raise UserError(f"{origin}: attention_head_dim is {config['attention_head_dim']}; it must be even")
    if not isinstance(config["eps"], int | float):
        raise UserError(f"{origin}: eps is {config['eps']!r}; it must be a number")
    if config["image_dim"] or config["added_kv_proj_dim"]:
        raise UserError(f"{origin} is of an image-to-video model; give a text-to-image/video one")


def model_files(folder: Path) -> list[Path]:
    """The safetensors files of a saved diffusers model: those that its index names, or its only one."""
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    whole = folder / "diffusion_pytorch_model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def check_weights(folder: Path, origin: str) -> None:
    """Raises UserError unless a saved model's safetensors files are all there and whole. Reads their headers only."""
    files = set(folder.glob("*.safetensors"))
    for index in folder.glob("*.safetensors.index.json"):
        try:
            files |= {folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{origin}: {folder.name}/{index.name} is not readable JSON with a weight_map") from error
    if not files:
        raise UserError(f"{origin}: {folder.name} holds no weights in safetensors (other formats are not read)")
    for file in sorted(files):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{origin}: {folder.name}/{file.name} is not a complete safetensors file ({error}); copy it again"
            ) from error


def _read_index(root: Path, given: str) -> dict[str, Any]:
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
    index = _read_json(root / "model_index.json", given)
    if index.get("_class_name") != "WanPipeline":
        raise UserError(f"teacher.path: {given} is a {index.get('_class_name')}; task diffusion distils WanPipeline")
    return index


def _is_original_config(root: Path) -> bool:
    """Whether `config.json` is that of Wan's own code, all that a hub's JSON files show of its layout."""
    file = root / "config.json"
    return file.is_file() and _read_json(file, os.fspath(root)).get("_class_name") == "WanModel"


def _read_json(file: Path, given: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"teacher.path: {given} lacks {file.parent.name}/{file.name}; give a complete pipeline folder"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"teacher.path: {given}: {file.parent.name}/{file.name} is not readable JSON") from error
    if not isinstance(content, dict):
        raise UserError(f"teacher.path: {given}: {file.parent.name}/{file.name} is not a JSON object")
    return content
