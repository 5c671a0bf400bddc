"""The Wan student: from a config, a folder, or the teacher's own blocks; and what is trained beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from safetensors import safe_open
from torch import Tensor, nn

from distiller.capture import capture_outputs
from distiller.depth import evenly_spaced
from distiller.diffusion_config import DiffusionStudent
from distiller.errors import UserError
from distiller.resources import local_path
from distiller.wan.pipeline import WanFiles, check_transformer_config, check_weights, transformer_defaults


def student_config(student: DiffusionStudent, files: WanFiles) -> dict[str, Any]:
    """The student's `config.json`, checked against the teacher's. Reads no weights.

    Raises:
        UserError: the file is missing or of another class, or its channels, patches or text width do not fit.
    """
    teacher = files.transformer_configs["transformer"]
    if student.from_teacher:
        config = {**teacher}
        for key in ("num_layers", "num_attention_heads", "ffn_dim"):
            wanted = getattr(student, key)
            if wanted is not None and wanted > teacher[key]:
                raise UserError(f"student.{key} is {wanted} and the teacher has only {teacher[key]}; lower it")
            config[key] = wanted or teacher[key]
    else:
        config = _read_config(student)
    for key, name in (
        ("in_channels", "input channels"),
        ("out_channels", "output channels"),
        ("text_dim", "text width"),
    ):
        ours, theirs = config[key], teacher[key]
        if ours != theirs:
            raise UserError(f"the student's {key} ({name}) is {ours} and the teacher's {theirs}; they must be equal")
    if list(config["patch_size"]) != list(teacher["patch_size"]):
        frame, height, width = config["patch_size"]
        if frame != 1 or height != width:
            raise UserError(f"the student's patch_size {config['patch_size']} is neither the teacher's nor (1, n, n)")
    try:
        with torch.device("meta"):
            WanTransformer3DModel.from_config(config)
    except Exception as error:
        kind = type(error).__name__
        raise UserError(f"diffusers cannot build a student of this config ({kind}: {error}); correct it") from error
    return config


def build_student(
    student: DiffusionStudent, config: Mapping[str, Any], files: WanFiles, seed: int
) -> WanTransformer3DModel:
    """Builds the student on the CPU in float32, the same on every rank and under every engine.

    New weights are drawn in a forked random state from `seed`; the global state is left as it was.
    """
    if student.path is not None:
        return _load_saved(student)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = WanTransformer3DModel.from_config(dict(config))
    assert isinstance(model, WanTransformer3DModel)
    if student.from_teacher:
        copy_from_teacher(model, files)
    return model


def copy_from_teacher(model: WanTransformer3DModel, files: WanFiles) -> None:
    """Fills the student with the teacher's evenly spaced blocks and leading channels, tensor by tensor.

    Depth: block i comes from the i-th of `evenly_spaced` blocks. Width: the leading slice of every axis, so the first
    heads and the first feed-forward channels are kept. Of two experts the low-noise one (`transformer_2`) would know
    only small timesteps, so `transformer` is the source.
    """
    root = files.fetch("transformer") / "transformer"
    teacher = files.transformer_configs["transformer"]
    blocks = evenly_spaced(model.config.num_layers, teacher["num_layers"])
    tensors = _SavedTensors(root)
    with torch.no_grad():
        for name, target in (*model.named_parameters(), *model.named_buffers()):
            source_name = name
            if name.startswith("blocks."):
                _, number, rest = name.split(".", 2)
                source_name = f"blocks.{blocks[int(number)]}.{rest}"
            if source_name in tensors:
                target.copy_(_leading_slice(tensors[source_name].float(), target, name))


class DistilledStudent(nn.Module):
    """What is trained: the student model and, for feature matching, projections into the teacher's width.

    One module, since DeepSpeed and FSDP prepare exactly one. Only `model` is exported.
    """

    def __init__(
        self, model: WanTransformer3DModel, feature_blocks: Sequence[int], teacher_dim: int, seed: int
    ) -> None:
        super().__init__()
        self.model = model
        self.feature_blocks = tuple(feature_blocks)
        dim = model.config.num_attention_heads * model.config.attention_head_dim
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 1)
            self.projections = nn.ModuleList(nn.Linear(dim, teacher_dim, bias=False) for _ in self.feature_blocks)

    def forward(self, latents: Tensor, timesteps: Tensor, text: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Predicts from latents [B, C, F, H, W], timesteps [B] and text [B, L, D].

        Returns:
            the prediction, like the latents, and one [B, tokens, teacher_dim] projected feature a matched block.
        """
        blocks = [(str(number), self.model.blocks[number]) for number in self.feature_blocks]
        with capture_outputs(blocks) as captured:
            prediction = self.model(latents, timesteps, text, return_dict=False)[0]
        # By index: Accelerate's regional compilation wraps an empty list into a module that cannot be iterated.
        features = [self.projections[i](captured[str(number)]) for i, number in enumerate(self.feature_blocks)]
        return prediction, features


def _read_config(student: DiffusionStudent) -> dict[str, Any]:
    if student.config is not None:
        file, key = local_path(student.config), "student.config"
    else:
        file, key = _model_folder(student) / "config.json", "student.path"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{key}: {file} does not exist; give a config.json of WanTransformer3DModel") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {file} is not readable JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{key}: {file} holds {type(config).__name__}, not a model's config")
    defaults = transformer_defaults()
    check_transformer_config(defaults | config, f"{key}: {file}")
    unknown = {name for name in config if name not in defaults and not name.startswith("_")}
    if unknown:
        raise UserError(
            f"{key}: {file} has keys that WanTransformer3DModel does not know: {', '.join(sorted(unknown))}"
        )
    if student.path is not None:
        check_weights(file.parent, f"student.path: {student.path}")
    return defaults | config


def _model_folder(student: DiffusionStudent) -> Path:
    folder = local_path(student.path or "")
    if not os.path.isdir(folder):
        raise UserError(f"student.path: {student.path} is not a folder; give a saved model's or a pipeline's")
    return folder / "transformer" if (folder / "transformer").is_dir() else folder


def _load_saved(student: DiffusionStudent) -> WanTransformer3DModel:
    return WanTransformer3DModel.from_pretrained(
        _model_folder(student), dtype=torch.float32, use_safetensors=True, local_files_only=True
    )


class _SavedTensors:
    """The tensors of a saved model, read one at a time from its safetensors files."""

    def __init__(self, folder: Path) -> None:
        self._files = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]
        self._owner = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 (not a mapping)

    def __contains__(self, name: str) -> bool:
        return name in self._owner

    def __getitem__(self, name: str) -> Tensor:
        return self._owner[name].get_tensor(name)


def _leading_slice(source: Tensor, target: Tensor, name: str) -> Tensor:
    """The leading part of every axis; `time_proj` stacks six vectors of the model's width, so each is cut."""
    if name.startswith("condition_embedder.time_proj."):
        source = source.unflatten(0, (6, -1))[:, : target.shape[0] // 6].flatten(0, 1)
    return source[tuple(slice(0, size) for size in target.shape)]
